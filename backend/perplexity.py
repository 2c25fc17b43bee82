"""Perplexity of a model on a text, by the path that serves scored prompts: exp(-mean log p(token | tokens before it)).

The text is cut into windows of equal length, side by side; a window begins afresh, and each of its tokens but the
first counts. Only differences between formats of one model mean something: the level depends on the window.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from backend.engine.config import EngineConfig
from backend.engine.engine import LLMEngine
from backend.engine.params import GenerationRequest, SamplingParams
from backend.models.batch import Model, cdiv
from backend.models.tokenizer import Tokenizer

WINDOW = 512
BLOCK_SIZE = 16


def perplexity(
    model: Model,
    tokenizer: Tokenizer,
    text: str,
    *,
    max_tokens: int | None = None,
    note: Callable[[int], object] = lambda num_tokens: None,
) -> float:
    """Of the first `max_tokens` tokens of `text`; `note` is told how many were scored, window by window.

    Raises:
        ValueError: the text has fewer than two tokens, or the model's logits are no numbers.
    """
    token_ids = tokenizer.encode(text, parse_special=False)[:max_tokens]
    if len(token_ids) < 2:
        raise ValueError(f"a perplexity needs two tokens or more, the text has {len(token_ids)}")
    window = min(WINDOW, model.max_position)
    config = EngineConfig(
        block_size=BLOCK_SIZE,
        max_num_seqs=1,
        max_num_batched_tokens=window,
        num_blocks=cdiv(window, BLOCK_SIZE),
        enable_prefix_cache=False,
    )
    engine = LLMEngine(model, tokenizer, config)
    logprobs: list[float] = []
    for start in range(0, len(token_ids) - 1, window):
        part = token_ids[start : start + window]
        logprobs += _logprobs(engine, part)
        note(len(part))
    return math.exp(-math.fsum(logprobs) / len(logprobs))


def _logprobs(engine: LLMEngine, token_ids: list[int]) -> list[float]:
    """Of every token behind the first."""
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    engine.add(GenerationRequest("window", token_ids, params))
    while engine.has_work:
        for output in engine.step():
            if output.error:
                raise ValueError(output.error)
            return [entry.logprob for entry in output.prompt_logprobs[1:]]
    raise AssertionError("the engine came to rest without an answer")
