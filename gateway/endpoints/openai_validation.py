"""Refusals of a request body in OpenAI's words: message, `param` as a path, code."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, cast

from plugins.errors import InvalidRequest

KINDS = {
    "int": "an integer",
    "float": "a decimal",
    "bool": "a boolean",
    "str": "a string",
    "array": "an array",
    "list": "an array",
    "object": "an object",
    "dict": "an object",
    "null": "null",
    "NoneType": "null",
}
"""How messages call a type, by the name that Python or the decoder gives it."""

_WHOLE_PARAMS = ("response_format", "logit_bias", "metadata")
_MAX_QUOTED_CHARS = 80


def shown_param(path: str) -> str | None:
    """`error.param` for a path: some parameters are named whole, whatever is wrong inside."""
    first = re.split(r"[.\[]", path, maxsplit=1)[0]
    return (first if first in _WHOLE_PARAMS else path) or None


def quoted(value: Any) -> str:
    """A value from the body in a message, cut: it may be megabytes."""
    if isinstance(value, list | dict):
        return KINDS[type(cast(object, value)).__name__]
    text = f"'{value[: _MAX_QUOTED_CHARS + 1]}'" if isinstance(value, str) else str(value)
    return text if len(text) <= _MAX_QUOTED_CHARS else f"{text[:_MAX_QUOTED_CHARS]}..."


def missing(path: str) -> InvalidRequest:
    return InvalidRequest(
        f"Missing required parameter: '{path}'.",
        param=shown_param(path),
        code="missing_required_parameter",
    )


def unknown_value(path: str, value: object, known: Sequence[str]) -> InvalidRequest:
    names = [f"'{name}'" for name in known]
    listed = f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]
    return InvalidRequest(
        f"Invalid value: {quoted(value)}. Supported values are: {listed}.",
        param=shown_param(path),
        code="invalid_value",
    )


def invalid_value(path: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"Invalid '{path}': {why}", param=shown_param(path), code="invalid_value")


def invalid_type(path: str, expected: str, got: object) -> InvalidRequest:
    return InvalidRequest(
        f"Invalid type for '{path}': expected {expected}, but got {KINDS[type(got).__name__]} instead.",
        param=shown_param(path),
        code="invalid_type",
    )


def empty_array(path: str) -> InvalidRequest:
    return InvalidRequest(
        f"Invalid '{path}': empty array. Expected an array with minimum length 1, "
        "but got an empty array instead.",
        param=shown_param(path),
        code="empty_array",
    )


def too_long_array(path: str, max_length: int, length: int) -> InvalidRequest:
    return InvalidRequest(
        f"Invalid '{path}': array too long. Expected an array with maximum length {max_length}, "
        f"but got an array with length {length} instead.",
        param=shown_param(path),
        code="array_above_max_length",
    )


def malformed(why: str) -> InvalidRequest:
    return InvalidRequest(f"We could not parse the JSON body of your request: {why}.")
