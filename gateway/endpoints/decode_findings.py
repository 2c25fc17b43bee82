"""What the decoder finds wrong with a body, put into OpenAI's words.

The shapes of bodies are msgspec Structs with their limits, so each limit stands in one place only, beside its field;
its finding ("Expected `int` >= 1 - at `$.n`") is read here once more, which costs only those who send a bad body.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, cast

import msgspec

from gateway.endpoints.openai_validation import KINDS, missing, quoted, shown_param
from plugins.errors import InvalidRequest

_STEP = re.compile(r"\.(\w+)|\[(\d+)\]|\[\.\.\.\]")
_NUMBERS = {"int": "integer", "float": "decimal"}
_SIZED = {"array": "an array", "object": "an object", "str": "a string"}


class Finding:
    """One msgspec.ValidationError about `document`: its reason, and the place as keys and indexes."""

    def __init__(self, exc: msgspec.ValidationError, document: Any) -> None:
        self.reason, _, where = str(exc).rpartition(" - at ")
        if not self.reason:
            self.reason, where = where, ""
        self._document = document
        self._in_key = where.startswith("`key`")
        self._steps = [_step(found) for found in _STEP.finditer(where.rpartition("`$")[2])]

    @property
    def path(self) -> str:
        """`messages[1].role`; "" = the body itself."""
        parts = [f"[{step}]" if isinstance(step, int) else f".{step or ''}" for step in self._steps]
        return "".join(parts).strip(".")

    @property
    def subject(self) -> str:
        return f"key in '{self.path}'" if self._in_key else f"'{self.path}'"

    @property
    def value(self) -> Any:
        """What stands there; None where it cannot be told: some entry of a map."""
        return None if self._in_key or None in self._steps else self._at(self._steps)

    def replace(self, value: Any) -> None:
        """Put another value there; only where `value` could be told."""
        self._at(self._steps[:-1])[self._steps[-1]] = value

    def error(self) -> InvalidRequest:
        for pattern, explain in _EXPLANATIONS:
            if found := pattern.match(self.reason):
                return explain(self, found)
        return self.refusal(f"{self.reason[:1].lower()}{self.reason[1:]}.")

    def refusal(self, why: str, code: str = "invalid_value") -> InvalidRequest:
        return InvalidRequest(
            f"Invalid {self.subject}: {why}", param=shown_param(self.path), code=code
        )

    def _at(self, steps: list[str | int | None]) -> Any:
        value = self._document
        for step in steps:
            value = value[step]
        return value


def _step(found: re.Match[str]) -> str | int | None:
    if found[1] is not None:
        return found[1]
    return None if found[2] is None else int(found[2])


def _missing(finding: Finding, found: re.Match[str]) -> InvalidRequest:
    return missing(f"{finding.path}.{found[1]}".lstrip("."))


def _wrong_type(finding: Finding, found: re.Match[str]) -> InvalidRequest:
    got = KINDS.get(found[2], found[2])
    if not finding.path:
        return InvalidRequest(
            f"Invalid request body: expected a JSON object, but got {got} instead."
        )
    kinds = [KINDS.get(kind, kind) for kind in found[1].split(" | ") if kind != "null"]
    wanted = kinds[0] if len(kinds) == 1 else f"one of {', '.join(kinds[:-1])} or {kinds[-1]}"
    return InvalidRequest(
        f"Invalid type for {finding.subject}: expected {wanted}, but got {got} instead.",
        param=shown_param(finding.path),
        code="invalid_type",
    )


def _out_of_bounds(finding: Finding, found: re.Match[str]) -> InvalidRequest:
    noun, operator = _NUMBERS[found[1]], found[2]
    limit = found[3] if noun == "integer" else f"{float(found[3]):g}"
    side, code = (
        ("above maximum", "above_max") if "<" in operator else ("below minimum", "below_min")
    )
    value = finding.value
    got = "" if value is None else f", but got {quoted(value)} instead"
    why = f"{noun} {side} value. Expected a value {operator} {limit}{got}."
    return finding.refusal(why, f"{noun}_{code}_value")


def _wrong_length(finding: Finding, found: re.Match[str]) -> InvalidRequest:
    noun = _SIZED[found[1]]
    kind = noun.split()[1]
    too_long = found[2] == "<="
    value = finding.value
    got = f", but got {noun} with length {_length(value)} instead" if value else ""
    fault, side = ("too long", "max") if too_long else ("too short", "min")
    why = f"{kind} {fault}. Expected {noun} with {side}imum length {found[3]}{got}."
    return finding.refusal(why, f"{kind}_{'above' if too_long else 'below'}_{side}_length")


def _length(value: Any) -> int:
    return len(cast(list[object], value))


def _no_match(finding: Finding, found: re.Match[str]) -> InvalidRequest:
    why = "string does not match pattern. Expected a string that matches the pattern"
    return finding.refusal(f"{why} '{found[1]}'.")


_EXPLANATIONS: list[tuple[re.Pattern[str], Callable[[Finding, re.Match[str]], InvalidRequest]]] = [
    (re.compile(r"Object missing required field `(\w+)`"), _missing),
    (re.compile(r"Expected `([^`]+)`, got `(\w+)`"), _wrong_type),
    (re.compile(r"Expected `(int|float)` (<=|>=|<|>) (\S+)"), _out_of_bounds),
    (re.compile(r"Expected `(\w+)` of length (<=|>=) (\d+)"), _wrong_length),
    (re.compile(r"Expected `str` matching regex '(.*)'"), _no_match),
]
