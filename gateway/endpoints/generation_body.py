"""Request fields that chat and completions share, with their limits, and how they become `Sampling`."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from gateway.endpoints.openai_validation import unknown_value
from plugins.errors import InvalidRequest
from plugins.events import Sampling

Decimal0To1 = Annotated[float, Meta(ge=0, le=1)]
Decimal0To2 = Annotated[float, Meta(ge=0, le=2)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
PositiveDecimal = Annotated[float, Meta(gt=0)]
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
PositiveCount = Annotated[int, Meta(ge=1, le=2**63 - 1)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
StopList = Annotated[list[str], Meta(max_length=4)]
LogitBias = dict[TokenId, Annotated[float, Meta(ge=-100, le=100)]]
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
    Meta(max_length=16),
]

Klass = Literal["interactive", "standard", "flex", "batch"]
SERVICE_TIERS: dict[str | None, Klass] = {
    None: "standard",
    "auto": "standard",
    "default": "standard",
    "scale": "standard",
    "flex": "flex",
    "priority": "interactive",
    "fast": "interactive",
}
"""Tier that a request may ask for -> the class in which it is scheduled."""


class StreamOptions(Struct):
    include_usage: bool | None = None


class GenerationBody(Struct, kw_only=True):
    """Every field but the prompt may be absent or null, which is the same. `top_k` -1 or 0 = all tokens."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Decimal0To2 | None = None
    top_p: Decimal0To1 | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    stop: str | StopList | None = None
    seed: Int64 | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: LogitBias | None = None
    user: str | None = None
    metadata: Metadata | None = None
    service_tier: str | None = None
    # What vLLM, SGLang, llama.cpp and others take beyond OpenAI's fields.
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Decimal0To1 | None = None
    repetition_penalty: PositiveDecimal | None = None
    min_tokens: Count | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None


def check_generation(body: GenerationBody) -> str:
    """Rules that span fields; returns the model's name."""
    if not body.model:
        raise InvalidRequest("you must provide a model parameter")
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest(
            "The 'stream_options' parameter is only allowed when 'stream' is enabled.",
            param="stream_options",
        )
    if body.service_tier not in SERVICE_TIERS:
        raise unknown_value(
            "service_tier", body.service_tier, [tier for tier in SERVICE_TIERS if tier]
        )
    return body.model


def wants_usage(body: GenerationBody) -> bool:
    return body.stream_options is not None and bool(body.stream_options.include_usage)


def sampling_of(body: GenerationBody, max_tokens: int | None) -> Sampling:
    """All shared fields; the caller adds logprobs, which differ between the two APIs."""
    stop = body.stop
    return Sampling(
        max_tokens=max_tokens,
        min_tokens=body.min_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        n=body.n or 1,
        seed=body.seed,
        stop=_stop_strings(stop) if stop else [],
        stop_token_ids=body.stop_token_ids or [],
        ignore_eos=bool(body.ignore_eos),
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        logit_bias=body.logit_bias or None,
    )


def _stop_strings(stop: str | list[str]) -> list[str]:
    """An empty string would match everywhere, so it stands for nothing."""
    return [text for text in ([stop] if isinstance(stop, str) else stop) if text]
