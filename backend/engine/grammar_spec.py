"""What an answer must look like, as a request says it. No llguidance here: the gateway side imports it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Literal, cast

import msgspec

# Between two JSON tokens: a space, or a line break and an indent. A model allowed any whitespace writes nothing else.
WHITESPACE = r"[ ]?|\n[ ]{0,12}"
MAX_GRAMMAR_CHARS = 1 << 19
MAX_PROPERTIES = (
    2000  # compiling optional ones costs the square of their number; these take two seconds
)
MAX_ENUM_VALUES = 5000


class InvalidGrammar(ValueError):
    """A grammar that cannot be used; the message is one line."""


class GrammarSpec(msgspec.Struct, frozen=True):
    """`text` is a JSON Schema, a regular expression, a JSON list of choices, or a grammar in Lark's notation."""

    kind: Literal["json_schema", "regex", "choice", "lark"]
    text: str
    param: str = "response_format"  # the request's field, for errors
    lenient: bool = (
        False  # leave out schema keywords that cannot be enforced, instead of refusing them
    )


def check_size(spec: GrammarSpec) -> None:
    """Raise InvalidGrammar where compiling would take the engine's time for itself."""
    if len(spec.text) > MAX_GRAMMAR_CHARS:
        raise InvalidGrammar(
            f"it has {len(spec.text)} characters; the limit is {MAX_GRAMMAR_CHARS}"
        )
    if spec.kind == "json_schema":
        _check_schema(json.loads(spec.text))


def _check_schema(schema: Any) -> None:
    num_properties = 0
    for part in _objects(schema):
        properties = part.get("properties")
        num_properties += len(properties) if isinstance(properties, dict) else 0
        if num_properties > MAX_PROPERTIES:
            raise InvalidGrammar(f"more than {MAX_PROPERTIES} properties")
        values = part.get("enum")
        if isinstance(values, list) and len(values) > MAX_ENUM_VALUES:
            raise InvalidGrammar(f"an enum of more than {MAX_ENUM_VALUES} values")
        if isinstance(pattern := part.get("pattern"), str):
            _check_pattern(pattern)


def _objects(schema: Any) -> Iterator[dict[str, Any]]:
    """Every object inside; a property that happens to be called "enum" is looked at as well, and is harmless."""
    todo = [schema]
    while todo:
        part = todo.pop()
        if isinstance(part, dict):
            yield cast("dict[str, Any]", part)
            todo += part.values()
        elif isinstance(part, list):
            todo += part


def _check_pattern(pattern: str) -> None:
    """The compiler reads `foo**` as `foo*`; no dialect of JSON Schema does."""
    try:
        re.compile(pattern)
    except (
        re.error
    ) as exc:  # other words of ECMA's dialect are not Python's, and none of our business
        if "multiple repeat" in str(exc):
            raise InvalidGrammar(f"pattern {pattern[:80]!r}: {exc}") from exc
    except (OverflowError, RecursionError) as exc:
        raise InvalidGrammar(f"pattern {pattern[:80]!r}: {exc}") from exc
