"""Shapes of a completions answer on the wire; whole answers and chunks differ only in `finish_reason`."""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec import Struct

from gateway.endpoints.openai_answer import finite_logprob
from plugins.events import TextDelta, TokenLogprob


class LogprobLists(Struct):
    """Four lists of one length, one entry per token; `text_offset` counts characters of the choice's text."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Struct):
    text: str
    index: int
    logprobs: LogprobLists | None = None
    finish_reason: str | None = None


def logprob_lists(event: TextDelta, position: int) -> LogprobLists:
    """`position`: characters of the choice before this event, for providers that give no offsets."""
    entries = event.logprobs
    return LogprobLists(
        [entry.token for entry in entries],
        [_value(entry) for entry in entries],
        [_top_of(entry) for entry in entries],
        _offsets(event, entries, position),
    )


def _value(entry: TokenLogprob) -> float | None:
    """NaN stands for "has none": the first token of an echoed prompt."""
    return None if math.isnan(entry.logprob) else finite_logprob(entry.logprob)


def _top_of(entry: TokenLogprob) -> dict[str, float] | None:
    """The likeliest tokens and the one that was taken, so up to one more than was asked for."""
    value = _value(entry)
    if value is None:
        return None
    top = {other.token: finite_logprob(other.logprob) for other in entry.top}
    top.setdefault(entry.token, value)
    return top


def _offsets(event: TextDelta, entries: Sequence[TokenLogprob], position: int) -> list[int]:
    if len(event.text_offsets) == len(entries):
        return list(event.text_offsets)
    offsets: list[int] = []
    for entry in entries:
        offsets.append(position)
        position += len(entry.token)
    return offsets
