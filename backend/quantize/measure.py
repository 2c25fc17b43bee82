"""What a report says of a model: bytes of its weights, perplexity on the held text, and how fast one stream decodes.

The held text is the beginning of William Morris, News from Nowhere (1890; public domain).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from backend.engine.config import EngineConfig
from backend.engine.engine import LLMEngine
from backend.engine.params import GenerationRequest, SamplingParams
from backend.models.loader import LoadedModel, load_model
from backend.perplexity import perplexity

PROMPT_TOKENS, DECODED_TOKENS = 64, 64


@dataclass(frozen=True, slots=True)
class Measured:
    weight_bytes: int
    perplexity: float
    tokens_per_s: float  # output, one stream


def held_text() -> str:
    return Path(__file__).with_name("held_text.txt").read_text(encoding="utf-8")


def measure(
    path: Path, max_tokens: int, threads: int | None, note: Callable[[int], object]
) -> Measured:
    """The model as it would be served; `note` is told how many tokens of the text were scored.

    Raises ModelLoadError.
    """
    loaded = load_model(path, threads=threads)
    text = held_text()
    return Measured(
        weight_bytes(path),
        perplexity(loaded.model, loaded.tokenizer, text, max_tokens=max_tokens, note=note),
        decode_rate(loaded, text),
    )


def weight_bytes(path: Path) -> int:
    if path.is_file():
        return path.stat().st_size
    files = [file for kind in ("*.safetensors", "*.gguf") for file in path.glob(kind)]
    return sum(file.stat().st_size for file in files)


def decode_rate(loaded: LoadedModel, text: str) -> float:
    """Greedy output tokens per second behind the first one."""
    prompt_ids = loaded.tokenizer.encode(text)[:PROMPT_TOKENS]
    room = min(len(prompt_ids) + DECODED_TOKENS, loaded.model.max_position)
    prompt_ids = prompt_ids[: max(1, room - DECODED_TOKENS)]
    config = EngineConfig(max_num_seqs=1, num_blocks=-(-room // EngineConfig().block_size) + 1)
    engine = LLMEngine(loaded.model, loaded.tokenizer, config)
    params = SamplingParams(temperature=0.0, max_tokens=room - len(prompt_ids), ignore_eos=True)
    engine.add(GenerationRequest("rate", prompt_ids, params))
    engine.step()  # the prompt, and the first token
    started_s, num_tokens = time.perf_counter(), 0
    while engine.has_work:
        num_tokens += sum(len(output.token_ids) for output in engine.step())
    return num_tokens / (time.perf_counter() - started_s)
