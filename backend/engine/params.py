"""What a caller asks of the engine and what comes back, in token ids and text. No torch: the gateway side imports it."""

from __future__ import annotations

from enum import IntEnum
from typing import Literal

import msgspec


class RequestClass(IntEnum):
    """Scheduling classes, most urgent first."""

    INTERACTIVE = 0
    STANDARD = 1
    FLEX = 2
    BATCH = 3


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """How to draw tokens. Ranges are checked by `check_params` before a request reaches the engine loop."""

    max_tokens: int | None = None  # None: to the end of the context
    min_tokens: int = 0
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    seed: int | None = None  # None: fresh entropy for this request
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # None: off; n: the chosen token and the n likeliest


class GenerationRequest(msgspec.Struct):
    """One sequence to generate. `n` choices are `n` requests that share their prompt's blocks."""

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    klass: RequestClass = RequestClass.STANDARD
    cache_salt: bytes = b""  # tenants with different salts never share prefix blocks


class TokenLogprob(msgspec.Struct, frozen=True):
    """One token's log-probability from the raw logits (before temperature, penalties and truncation)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token_id, logprob), likeliest first


FinishReason = Literal["stop", "length", "abort", "error"]


class StepOutput(msgspec.Struct):
    """What one step added to one request. `text` is safe to show: whole characters, no part of a stop string."""

    request_id: str
    token_ids: list[int] = msgspec.field(default_factory=list[int])
    text: str = ""
    logprobs: list[TokenLogprob] = msgspec.field(default_factory=list[TokenLogprob])
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string or token id that ended it; None: end of turn or length
    error: str = ""  # why, when finish_reason is "error"
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0  # prompt tokens that the prefix cache saved
    num_output_tokens: int = 0  # generated so far, end-of-turn token included


class EngineStats(msgspec.Struct, frozen=True):
    """A snapshot for metrics and the idle integrity check. Blocks are KV blocks."""

    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int  # allocatable now: never used, or cached with no owner
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_steps: int = 0
