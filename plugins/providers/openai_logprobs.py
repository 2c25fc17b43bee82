"""Log probabilities of chat (`content[]`) and of completions (parallel arrays)."""

from __future__ import annotations

import math
from typing import Any, cast

from plugins.events import Json, TokenLogprob

NO_LOGPROBS: tuple[tuple[TokenLogprob, ...], tuple[int, ...]] = ((), ())
UNLIKELY = (
    -9999.0
)  # what stands for "very unlikely" in OpenAI's answers, and here for no number at all


def read_logprobs(value: Any) -> tuple[tuple[TokenLogprob, ...], tuple[int, ...]]:
    """Tokens with their log probabilities, and for completions where each begins in the text."""
    if not isinstance(value, dict):
        return NO_LOGPROBS
    fields = cast(Json, value)
    if "content" in fields:
        return tuple(_token(item) for item in _dicts(fields["content"])), ()
    tokens = _list(fields.get("tokens"))
    numbers = _list(fields.get("token_logprobs"))
    tops = _list(fields.get("top_logprobs"))
    offsets = [offset for offset in _list(fields.get("text_offset")) if isinstance(offset, int)]
    entries = [
        TokenLogprob(
            token if isinstance(token, str) else "",
            _number(numbers[i] if i < len(numbers) else None, math.nan),  # null: begins a prompt
            None,
            _top_of_mapping(tops[i] if i < len(tops) else None),
        )
        for i, token in enumerate(tokens)
    ]
    return tuple(entries), tuple(offsets) if len(offsets) == len(entries) else ()


def _token(item: Json) -> TokenLogprob:
    raw = item.get("bytes")
    return TokenLogprob(
        item["token"] if isinstance(item.get("token"), str) else "",
        _number(item.get("logprob")),
        cast(list[int], raw) if isinstance(raw, list) else None,
        [_token(top) for top in _dicts(item.get("top_logprobs"))],
    )


def _top_of_mapping(value: Any) -> list[TokenLogprob]:
    if not isinstance(value, dict):
        return []
    return [TokenLogprob(token, _number(number)) for token, number in cast(Json, value).items()]


def _number(value: Any, missing: float = UNLIKELY) -> float:
    return float(value) if isinstance(value, int | float) else missing


def _list(value: Any) -> list[Any]:
    return cast(list[Any], value) if isinstance(value, list) else []


def _dicts(value: Any) -> list[Json]:
    return [cast(Json, item) for item in _list(value) if isinstance(item, dict)]
