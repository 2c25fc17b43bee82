"""Time to the first token of a prompt whose beginning was met before, beside one that is new to the engine.

    python bench/prefix_ttft.py [--model M.gguf] [--prefix 1024] [--tail 16] [--activations int8] [--threads N]

In process, one request at a time, cold and warm in turns. Each round has a prefix of its own; the warm prompt has
another tail behind it.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from pathlib import Path

from backend.engine.engine import EngineConfig, LLMEngine
from backend.engine.params import GenerationRequest, SamplingParams
from backend.models.demo import fetch_demo_model
from backend.models.loader import load_model


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", type=Path, help="a .gguf file or folder; the demo model if absent"
    )
    parser.add_argument("--prefix", type=int, default=1024)
    parser.add_argument("--tail", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--activations", default="auto")
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    path = args.model or fetch_demo_model(Path("data"))
    loaded = load_model(path, threads=args.threads, activations=args.activations)
    engine = LLMEngine(loaded.model, loaded.tokenizer, EngineConfig(kv_cache_gb=0.5))
    words = random.Random(0)
    cold_ms, warm_ms = [], []
    for _ in range(args.rounds):
        prefix = words.choices(range(100, engine.vocab_size), k=args.prefix)
        for times_ms in (cold_ms, warm_ms):
            tail = words.choices(range(100, engine.vocab_size), k=args.tail)
            times_ms.append(ttft_ms(engine, prefix + tail))
    cold, warm = statistics.median(cold_ms), statistics.median(warm_ms)
    print(f"cold {cold:.1f} ms ({min(cold_ms):.1f}-{max(cold_ms):.1f})")
    print(f"warm {warm:.1f} ms ({min(warm_ms):.1f}-{max(warm_ms):.1f}): {cold / warm:.1f}x faster")


def ttft_ms(engine: LLMEngine, prompt_ids: list[int]) -> float:
    start_s = time.perf_counter()
    engine.add(GenerationRequest("r", prompt_ids, SamplingParams(max_tokens=1, temperature=0.0)))
    while engine.has_work:
        engine.step()
    return (time.perf_counter() - start_s) * 1e3


if __name__ == "__main__":
    main()
