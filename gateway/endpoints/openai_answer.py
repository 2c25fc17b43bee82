"""What chat and completions answers have in common on the wire: usage, the head of a chunk, logprob values."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from msgspec import UNSET, Struct, UnsetType

from plugins.events import Request, Started, Usage

LOWEST_LOGPROB = -9999.0
"""OpenAI's value for "very unlikely": JSON has no -Infinity."""


class PromptTokensDetails(Struct):
    cached_tokens: int
    cache_write_tokens: int
    audio_tokens: int = 0


class CompletionTokensDetails(Struct):
    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int
    audio_tokens: int = 0


class UsageAnswer(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class Answer(Struct):
    """A chunk of a stream, or a whole answer. In a stream `usage` is null in all chunks but the last if asked for."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str | None
    choices: Sequence[Struct]
    service_tier: str | UnsetType = UNSET
    usage: UsageAnswer | UnsetType | None = UNSET


def new_answer(started: Started, object_name: str, choices: Sequence[Struct]) -> Answer:
    return Answer(
        started.id,
        object_name,
        started.created_s,
        started.model,
        started.fingerprint,
        choices,
        UNSET if started.service_tier is None else started.service_tier,
    )


def usage_answer(usage: Usage) -> UsageAnswer:
    return UsageAnswer(
        usage.prompt_tokens,
        usage.completion_tokens,
        usage.prompt_tokens + usage.completion_tokens,
        PromptTokensDetails(usage.cached_tokens, usage.cache_write_tokens),
        CompletionTokensDetails(
            usage.reasoning_tokens,
            usage.accepted_prediction_tokens,
            usage.rejected_prediction_tokens,
        ),
    )


def started_or_made(started: Started | None, request: Request, id_prefix: str) -> Started:
    """What every chunk repeats; made from the request where the provider left it out.

    A client that asked for a tier is told which one it got: the default one, where the provider knows of no tiers.
    """
    if started is None:
        started = Started("", "", 0)
    return Started(
        started.id or id_prefix + request.id.removeprefix("req_"),
        started.model or request.model,
        started.created_s or int(time.time()),
        started.fingerprint,
        started.service_tier or ("default" if request.service_tier else None),
    )


def finite_logprob(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LOWEST_LOGPROB
