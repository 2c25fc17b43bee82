"""The faults of a JSON Schema that no engine can overlook: types that do not exist, parts that are no schemas."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from plugins.errors import InvalidRequest
from plugins.events import Json

_TYPES = frozenset({"string", "number", "integer", "object", "array", "boolean", "null"})
_MAPS = ("properties", "$defs", "definitions", "patternProperties")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_SINGLES = ("items", "additionalProperties", "not")


def check_schema(schema: Json, name: str) -> None:
    """Raise InvalidRequest naming the place; `name` is the response format's own."""
    todo: list[tuple[tuple[str, ...], Any]] = [((), schema)]
    while todo:
        context, part = todo.pop()
        if isinstance(part, bool):
            continue
        if not isinstance(part, dict):
            raise _invalid(name, context, "a schema must be an object")
        fields = cast(Json, part)
        kind = fields.get("type")
        for one in cast(list[Any], kind) if isinstance(kind, list) else [kind]:
            if one is not None and (not isinstance(one, str) or one not in _TYPES):
                raise _invalid(name, context, f"{str(one)[:80]!r} is not a type")
        todo += _inner(fields, context)


def _inner(fields: Json, context: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key in _MAPS:
        inner = fields.get(key)
        if isinstance(inner, dict):
            for entry, part in cast(Json, inner).items():
                yield (*context, key, entry), part
    for key in _LISTS:
        inner = fields.get(key)
        if isinstance(inner, list):
            for i, part in enumerate(cast(list[Any], inner)):
                yield (*context, key, str(i)), part
    for key in _SINGLES:
        if key in fields and not isinstance(fields[key], list):  # "items" may be a list
            yield (*context, key), fields[key]


def _invalid(name: str, context: tuple[str, ...], why: str) -> InvalidRequest:
    return InvalidRequest(
        f"Invalid schema for response_format '{name}': In context={context}, {why}.",
        param="response_format",
        code="invalid_value",
    )
