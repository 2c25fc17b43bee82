"""From a request's words for structured output to one `GrammarSpec`: OpenAI's `response_format`, and vLLM's fields."""

from __future__ import annotations

import json
from typing import Any

from backend.engine.grammar_spec import GrammarSpec
from plugins.errors import InvalidRequest
from plugins.events import Request, ResponseFormat

_GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
_STRUCTURED = ("json", "regex", "choice", "grammar", "json_object")


def grammar_spec(request: Request) -> GrammarSpec | None:
    """Raises InvalidRequest where a field has the wrong form, or two fields ask for different things."""
    found = [*_of_response_format(request.response_format), *_of_extra(request.extra)]
    if len(found) > 1:
        names = " and ".join(spec.param for spec in found[:2])
        raise InvalidRequest(f"{names} cannot be used together", param=found[1].param)
    return found[0] if found else None


def _of_response_format(form: ResponseFormat | None) -> list[GrammarSpec]:
    if form is None or form.kind == "text":
        return []
    if form.kind == "json_object":
        return [_json({"type": "object"}, "response_format")]
    if form.kind == "json_schema":
        if form.strict:
            _check_closed(form.schema or {}, form.name or "")
        return [_json(form.schema or {}, "response_format", lenient=not form.strict)]
    kind = "regex" if form.kind == "regex" else "lark"
    return [GrammarSpec(kind, form.pattern or "")]


def _check_closed(schema: dict[str, Any], name: str) -> None:
    """OpenAI's rule for strict schemas: objects have the properties they name, and no others."""
    todo: list[tuple[tuple[str, ...], Any]] = [((), schema)]
    while todo:
        context, part = todo.pop()
        if not isinstance(part, dict):
            continue
        if part.get("type") == "object" and part.get("additionalProperties") is not False:
            raise InvalidRequest(
                f"Invalid schema for response_format '{name}': In context={context}, "
                "'additionalProperties' is required to be supplied and to be false.",
                param="response_format",
                code="invalid_value",
            )
        for key in ("properties", "$defs", "definitions"):
            inner = part.get(key)
            for entry, value in inner.items() if isinstance(inner, dict) else ():
                todo.append(((*context, key, entry), value))
        for key in ("anyOf", "allOf", "oneOf", "prefixItems"):
            inner = part.get(key)
            for i, value in enumerate(inner if isinstance(inner, list) else ()):
                todo.append(((*context, key, str(i)), value))
        todo.append(((*context, "items"), part.get("items")))


def _of_extra(extra: dict[str, Any]) -> list[GrammarSpec]:
    given = {name: (name.removeprefix("guided_"), extra[name]) for name in _GUIDED if name in extra}
    structured = extra.get("structured_outputs")
    if structured is not None:
        if not isinstance(structured, dict):
            raise _invalid("structured_outputs", "must be an object")
        given |= {
            f"structured_outputs.{name}": (name, structured[name])
            for name in _STRUCTURED
            if name in structured
        }
    return [
        _read(kind, value, param)
        for param, (kind, value) in given.items()
        if value is not None and value is not False
    ]


def _read(kind: str, value: Any, param: str) -> GrammarSpec:
    if kind == "json_object":
        return _json({"type": "object"}, param)
    if kind == "json":
        return _json(_schema(value, param), param, lenient=True)
    if kind == "choice":
        if not (isinstance(value, list) and value and all(isinstance(x, str) for x in value)):
            raise _invalid(param, "must be a list of at least one string")
        return GrammarSpec("choice", json.dumps(value), param)
    if not isinstance(value, str):
        raise _invalid(param, "must be a string")
    return GrammarSpec("regex" if kind == "regex" else "lark", value, param)


def _schema(value: Any, param: str) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as exc:
            raise _invalid(param, f"is not JSON: {exc}") from exc
    if not isinstance(value, dict):
        raise _invalid(param, "must be a JSON Schema object")
    return value


def _json(schema: dict[str, Any], param: str, *, lenient: bool = False) -> GrammarSpec:
    return GrammarSpec("json_schema", json.dumps(schema), param, lenient)


def _invalid(param: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"{param} {why}", param=param)
