"""Look into JSON that others wrote without being surprised: a wrong type is the same as nothing."""

from __future__ import annotations

import json
from typing import Any, cast

import msgspec

from plugins.events import Json


def parse_json(data: bytes) -> Any:
    """JSON as servers write it: also with bytes that are no UTF-8, halves of surrogate pairs, NaN.

    Raises:
        ValueError: not JSON at all.
    """
    try:
        return msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        pass
    except RecursionError as exc:
        raise ValueError("nested too deeply") from exc
    try:
        return json.loads(data.decode("utf-8-sig", "replace"))
    except RecursionError as exc:
        raise ValueError("nested too deeply") from exc


def an_object(value: Any) -> Json:
    return cast(Json, value) if isinstance(value, dict) else {}


def objects(value: Any) -> list[Json]:
    """The objects of a list; one object stands for a list of itself."""
    items = cast(list[Any], value) if isinstance(value, list) else [value]
    return [cast(Json, item) for item in items if isinstance(item, dict)]


def a_text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def joined_text(value: Any) -> str:
    """A text, or the joined texts of parts."""
    if isinstance(value, str):
        return value
    return "".join(a_text(part.get("text")) for part in objects(value))


def json_text(value: Any) -> str:
    """Arguments: a text of JSON, or the JSON itself."""
    if isinstance(value, str):
        return value
    return "" if value is None else msgspec.json.encode(value).decode()


def a_count(fields: Json, *names: str) -> int | None:
    for name in names:
        value = fields.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and value >= 0:
            return int(value)
    return None
