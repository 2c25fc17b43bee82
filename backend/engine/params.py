"""What a caller asks of the engine and what comes back. No torch: the gateway side imports it."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import Any, Literal, Protocol

import msgspec


class RequestClass(IntEnum):
    """Scheduling classes, most urgent first."""

    INTERACTIVE = 0
    STANDARD = 1
    FLEX = 2
    BATCH = 3


class Objective(msgspec.Struct, frozen=True, omit_defaults=True):
    """When tokens are due. None: the class's own for the first token, none for the others."""

    ttft_ms: float | None = None  # from arrival in the engine to the first token
    tpot_ms: float | None = None  # from one token to the next, on average since the first


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """How to draw tokens. Ranges are checked by `check_params` before a request reaches the engine loop."""

    max_tokens: int | None = None  # None: to the end of the context; 0: with prompt_logprobs only
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
    prompt_logprobs: int | None = None  # the same of every prompt token


Pooling = Literal["mean", "last"]


class EmbeddingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """In place of an answer, one vector of the prompt."""

    dimensions: int | None = None  # None: as many as the model's hidden states have


class TokenConstraint(Protocol):
    """Which tokens may come next; `backend.engine.grammar.TokenGrammar` is one. It follows one request's tokens."""

    @property
    def error(self) -> str: ...

    @property
    def is_finished(self) -> bool: ...

    def prepare(self) -> None: ...

    def apply(self, logits: Any) -> None: ...

    def accept(self, token_id: int) -> None: ...

    def rollback(self, num_tokens: int) -> None: ...


class GenerationRequest(msgspec.Struct):
    """One sequence to generate. `n` choices are `n` requests that share their prompt's blocks."""

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    klass: RequestClass = RequestClass.STANDARD
    cache_salt: bytes = b""  # tenants with different salts never share prefix blocks
    grammar: TokenConstraint | None = (
        None  # this request's own; it starts at the first output token
    )
    markers: dict[int, bytes] = msgspec.field(  # special tokens that show in the text, and how
        default_factory=dict[int, bytes]
    )
    objective: Objective = Objective()
    embedding: EmbeddingParams | None = None  # then `params` say nothing


class TokenLogprob(msgspec.Struct, frozen=True):
    """One token's log-probability from the raw logits (before temperature, penalties and truncation)."""

    token_id: int
    logprob: float  # NaN: the first token of a prompt, which nothing comes before
    top: tuple[tuple[int, float], ...] = ()  # (token_id, logprob), likeliest first


FinishReason = Literal["stop", "length", "abort", "error"]


class StepOutput(msgspec.Struct):
    """What one step added to one request. `text` is safe to show: whole characters, no part of a stop string.

    `prompt_logprobs` holds one entry for every prompt token, all of them in the first output of a request.
    """

    request_id: str
    token_ids: list[int] = msgspec.field(default_factory=list[int])
    text: str = ""
    logprobs: list[TokenLogprob] = msgspec.field(default_factory=list[TokenLogprob])
    prompt_logprobs: list[TokenLogprob] = msgspec.field(default_factory=list[TokenLogprob])
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = (
        None  # the stop string or token id that ended it; None: end of turn or length
    )
    error: str = ""  # why, when finish_reason is "error"
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0  # prompt tokens that the prefix cache saved
    num_output_tokens: int = 0  # generated so far, end-of-turn token included
    num_draft_tokens: int = 0  # guessed so far
    num_accepted_tokens: int = 0  # of those, right
    mean_logprob: float = 0.0  # of the tokens generated so far, where `logprobs` are asked for
    embedding: bytes = b""  # float32, little-endian, of length 1; then there is no other output


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
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    oldest_waiting_s: float = 0.0  # how long the request that has waited longest has done so
    num_evictions: int = 0  # blocks whose cached contents were given up for new ones
    running_by_class: tuple[int, ...] = (0,) * len(RequestClass)  # most urgent class first
    waiting_by_class: tuple[int, ...] = (0,) * len(RequestClass)


MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 32
MAX_STOP_CHARS = 4096

_RANGES: tuple[tuple[str, float, float], ...] = (
    ("temperature", 0.0, 2.0),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
    ("repetition_penalty", 0.01, 10.0),
    ("top_k", -1, 2**31 - 1),
    ("seed", -(2**63), 2**63 - 1),
    ("logprobs", 0, MAX_LOGPROBS),
    ("prompt_logprobs", 0, MAX_LOGPROBS),
    ("min_tokens", 0, 2**31 - 1),
)


class InvalidGeneration(ValueError):
    """A request that can never run. `param` is the field at fault, `code` OpenAI's error code."""

    def __init__(self, message: str, param: str, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


def check_params(
    params: SamplingParams, *, vocab_size: int, max_model_len: int, num_prompt_tokens: int
) -> None:
    """Raise InvalidGeneration, naming the field and the limit, unless a request with these could run."""
    for name, low, high in _RANGES:
        value = getattr(params, name)
        if value is not None and not low <= value <= high:  # NaN is out of range too
            raise InvalidGeneration(f"{name} must be between {low} and {high}, got {value}", name)
    _check_max_tokens(params)
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        message = f"min_tokens {params.min_tokens} is above max_tokens {params.max_tokens}"
        raise InvalidGeneration(message, "min_tokens")
    _check_stop(params.stop)
    check_token_ids(params.stop_token_ids, "stop_token_ids", vocab_size)
    check_token_ids(params.logit_bias or (), "logit_bias", vocab_size)
    for token_id, bias in (params.logit_bias or {}).items():
        if not -100.0 <= bias <= 100.0:
            message = f"logit_bias must be between -100 and 100, got {bias} for token {token_id}"
            raise InvalidGeneration(message, "logit_bias")
    _check_length(params, max_model_len, num_prompt_tokens)


def check_embedding(
    params: EmbeddingParams, *, hidden_size: int, max_model_len: int, num_prompt_tokens: int
) -> None:
    """Raise InvalidGeneration, naming the field and the limit, unless a vector of these could be made."""
    dimensions = params.dimensions
    if dimensions is not None and not 1 <= dimensions <= hidden_size:
        message = f"dimensions must be between 1 and {hidden_size}, got {dimensions}"
        raise InvalidGeneration(message, "dimensions")
    if num_prompt_tokens < 1:
        raise InvalidGeneration("the input is empty: it needs at least one token", "input")
    if num_prompt_tokens > max_model_len:
        message = f"the maximum context length is {max_model_len} tokens; the input has {num_prompt_tokens}"
        raise InvalidGeneration(message, "input", "context_length_exceeded")


def check_token_ids(token_ids: Iterable[int], param: str, vocab_size: int) -> None:
    """Raise InvalidGeneration unless every id is in the vocabulary."""
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            message = (
                f"{param} holds token id {token_id}; the vocabulary has {vocab_size} ids, from 0"
            )
            raise InvalidGeneration(message, param)


def _check_max_tokens(params: SamplingParams) -> None:
    low, high = int(params.prompt_logprobs is None), 2**31 - 1
    if params.max_tokens is not None and not low <= params.max_tokens <= high:
        message = f"max_tokens must be between {low} and {high}, got {params.max_tokens}"
        raise InvalidGeneration(message, "max_tokens")


def _check_stop(stop: tuple[str, ...]) -> None:
    if len(stop) > MAX_STOP_STRINGS:
        raise InvalidGeneration(
            f"stop holds {len(stop)} strings, the limit is {MAX_STOP_STRINGS}", "stop"
        )
    for text in stop:
        if not 1 <= len(text) <= MAX_STOP_CHARS:
            message = f"a stop string must have 1 to {MAX_STOP_CHARS} characters, got {len(text)}"
            raise InvalidGeneration(message, "stop")


def _check_length(params: SamplingParams, max_model_len: int, num_prompt_tokens: int) -> None:
    if num_prompt_tokens < 1:
        raise InvalidGeneration("the prompt is empty: it needs at least one token", "prompt")
    limit = f"maximum context length is {max_model_len} tokens"
    if num_prompt_tokens > max_model_len - (params.max_tokens != 0):
        message = (
            f"the {limit}; the prompt has {num_prompt_tokens} and leaves no room for an answer"
        )
        raise InvalidGeneration(message, "prompt", "context_length_exceeded")
    total = num_prompt_tokens + (params.max_tokens or 0)
    if total > max_model_len:
        message = (
            f"the {limit}; the prompt has {num_prompt_tokens} and max_tokens asks for "
            f"{params.max_tokens}: {total} in all"
        )
        raise InvalidGeneration(message, "max_tokens", "context_length_exceeded")
