"""POST /v1/completions: body -> Request. The prompt is text or token ids, one or many."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from gateway.endpoints.generation_body import (
    SERVICE_TIERS,
    Count,
    GenerationBody,
    check_generation,
    sampling_of,
    wants_usage,
)
from gateway.endpoints.json_body import BodyReader, without_bom
from gateway.endpoints.openai_validation import invalid_value
from gateway.endpoints.text_or_ids import TextOrIds, read_text_or_ids
from plugins.events import Json, Request, Sampling

DEFAULT_MAX_TOKENS = 16


class CompletionsBody(GenerationBody, kw_only=True):
    prompt: TextOrIds | None = None
    max_tokens: Count | None = None
    suffix: str | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None
    best_of: Annotated[int, Meta(ge=0, le=20)] | None = None


_reader = BodyReader(CompletionsBody)


def decode_completions(body: bytes, request_id: str, received_s: float) -> Request:
    """Raises InvalidRequest. `suffix` travels in `extra`: few models can fill in the middle."""
    body = without_bom(body)
    completions, extra = _reader.read(body)
    return Request(
        id=request_id,
        dialect="completions",
        model=check_generation(completions),
        messages=[],
        prompts=read_text_or_ids("prompt", completions.prompt),
        sampling=_sampling(completions),
        stream=bool(completions.stream),
        include_usage=wants_usage(completions),
        tools=[],
        user=completions.user,
        metadata=completions.metadata,
        service_tier=completions.service_tier,
        klass=SERVICE_TIERS[completions.service_tier],
        extra=_with_suffix(extra, completions.suffix),
        body=body,
        received_s=received_s,
    )


def _sampling(body: CompletionsBody) -> Sampling:
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    sampling = sampling_of(body, max_tokens)
    sampling.echo = bool(body.echo)
    if body.logprobs is not None:
        sampling.logprobs = True
        sampling.top_logprobs = body.logprobs
        sampling.prompt_logprobs = sampling.echo
    if body.best_of:
        sampling.best_of = _checked_best_of(body.best_of, sampling.n, bool(body.stream))
    return sampling


def _checked_best_of(best_of: int, n: int, stream: bool) -> int:
    if best_of < n:
        raise invalid_value("best_of", f"expected a value >= 'n', which is {n}, but got {best_of}.")
    if stream and best_of > n:
        raise invalid_value("best_of", "cannot be used with 'stream'.")
    return best_of


def _with_suffix(extra: Json, suffix: str | None) -> Json:
    return {**extra, "suffix": suffix} if suffix else extra
