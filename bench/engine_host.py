"""What a step of the engine costs beside the model: scheduling, batch building, drawing tokens, text.

    python bench/engine_host.py [--model M.gguf] [--batch 1 16] [--activations int8] [--threads N]

Decode steps of the real engine on the native tier. `host` is the step less the one call into the native library, so the
packing of its arguments counts too; the medians of 40 steps.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

from backend.engine.engine import EngineConfig, LLMEngine
from backend.engine.params import GenerationRequest, SamplingParams
from backend.models.demo import fetch_demo_model
from backend.models.loader import LoadedModel, load_model
from backend.models.native_llama import NativeLlama

PROMPT_TOKENS, STEPS = 130, 40
DRAWS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature 1": {"temperature": 1.0},
    "top_p 0.95": {"temperature": 0.8, "top_p": 0.95},
    "top_k 40, top_p 0.95": {"temperature": 0.8, "top_p": 0.95, "top_k": 40},
    "min_p 0.05": {"temperature": 1.0, "min_p": 0.05},
    "penalties": {"temperature": 1.0, "presence_penalty": 0.5, "repetition_penalty": 1.1},
    "logprobs 5": {"temperature": 1.0, "logprobs": 5},
}


class TimedLibrary:
    """The native library, with a clock at its one large call."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self.inside_s = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)

    def tidegate_forward(self, *arguments: Any) -> Any:
        start_s = time.perf_counter()
        fault = self._library.tidegate_forward(*arguments)
        self.inside_s += time.perf_counter() - start_s
        return fault


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="a .gguf file; the demo model if absent")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--activations", default="auto")
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    path = args.model or fetch_demo_model(Path("data"))
    loaded = load_model(path, threads=args.threads, activations=args.activations)
    model = loaded.model
    if not isinstance(model, NativeLlama):
        raise SystemExit("this machine has no native tier")
    model._library = clock = TimedLibrary(model._library)
    print("batch  draw                   step ms  host ms")
    for batch in args.batch:
        for name, params in DRAWS.items():
            step_ms, host_ms = measure(loaded, clock, batch, params)
            print(f"{batch:5}  {name:<22}{step_ms:8.2f}{host_ms:9.3f}")


def measure(
    loaded: LoadedModel, clock: TimedLibrary, batch: int, params: dict[str, Any]
) -> tuple[float, float]:
    engine = LLMEngine(loaded.model, loaded.tokenizer, EngineConfig(kv_cache_gb=0.5))
    for number in range(batch):
        prompt = [(7 * number + i * i) % 40_000 + 10 for i in range(PROMPT_TOKENS)]
        sampling = SamplingParams(max_tokens=1000, ignore_eos=True, seed=number, **params)
        engine.add(GenerationRequest(str(number), prompt, sampling))
    while len(engine.step()) < batch:
        pass
    step_ms, host_ms = [], []
    for _ in range(STEPS):
        clock.inside_s, start_s = 0.0, time.perf_counter()
        engine.step()
        step_s = time.perf_counter() - start_s
        step_ms.append(step_s * 1e3)
        host_ms.append((step_s - clock.inside_s) * 1e3)
    return statistics.median(step_ms), statistics.median(host_ms)


if __name__ == "__main__":
    main()
