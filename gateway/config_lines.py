"""On which line each key of a TOML text stands. `tomllib` checks the text and gives the values, but no places."""

from __future__ import annotations

import contextlib
import re
import tomllib
from itertools import count

from gateway.config_faults import At

_BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_SPACE = re.compile(r"[ \t]*")
_KEY = re.compile(r'"(?:[^"\\\n]|\\.)*"|\'[^\'\n]*\'|[A-Za-z0-9_-]+')
_STRING = re.compile(
    r'"""(?:[^"\\]|\\.|"{1,2}(?!"))*"{3,5}|\'\'\'(?:[^\']|\'{1,2}(?!\'))*\'{3,5}'
    r'|"(?:[^"\\\n]|\\.)*"|\'[^\'\n]*\'',
    re.DOTALL,
)
_SCALAR = re.compile(r"[^,\]}#\n]+")


def key_lines(text: str) -> dict[At, int]:
    """Line numbers (from 1) of all tables, keys and list items.

    `text` must be TOML that tomllib took. What this scanner does not understand ends the map early; it never raises.
    """
    scanner = _Scanner(text)
    with contextlib.suppress(_Lost, tomllib.TOMLDecodeError, RecursionError):
        scanner.document()
    return scanner.lines


class _Lost(Exception):
    """The scanner met something that it does not know."""


class _Scanner:
    def __init__(self, text: str) -> None:
        self.lines: dict[At, int] = {}
        self._text = text
        self._pos = 0
        self._line = 1
        self._counts: dict[At, int] = {}  # how many items each [[array of tables]] has so far

    def document(self) -> None:
        table: At = ()
        self._skip(_BLANK)
        while self._pos < len(self._text):
            if self._text[self._pos] == "[":
                table = self._header()
            else:
                self._pair(table)
            self._skip(_BLANK)

    def _header(self) -> At:
        is_array = self._text.startswith("[[", self._pos)
        self._expect("[[" if is_array else "[")
        line = self._line
        *parents, last = self._dotted_key()
        self._expect("]]" if is_array else "]")
        at = (*self._resolve((), parents), last)
        self.lines.setdefault(at, line)
        if is_array:
            self._counts[at] = self._counts.get(at, 0) + 1
        at = self._resolve(at[:-1], [last])
        self.lines.setdefault(at, line)
        return at

    def _pair(self, table: At) -> None:
        line = self._line
        at = table
        for part in self._dotted_key():
            at = (*at, part)
            self.lines.setdefault(at, line)
        self._expect("=")
        self._skip(_SPACE)
        self._value(at)

    def _resolve(self, at: At, parts: list[str]) -> At:
        """A header's path means the newest item of each array of tables that it passes."""
        for part in parts:
            at = (*at, part)
            if at in self._counts:
                at = (*at, self._counts[at] - 1)
        return at

    def _dotted_key(self) -> list[str]:
        parts = [self._one_key()]
        while self._text.startswith(".", self._pos):
            self._expect(".")
            parts.append(self._one_key())
        return parts

    def _one_key(self) -> str:
        self._skip(_SPACE)
        raw = self._require(_KEY)
        self._skip(_SPACE)
        return next(iter(tomllib.loads(f"{raw} = 0")))

    def _value(self, at: At) -> None:
        char = self._text[self._pos : self._pos + 1]
        if char == "[":
            self._array(at)
        elif char == "{":
            self._inline_table(at)
        else:
            self._require(_STRING if char in ("'", '"') else _SCALAR)

    def _array(self, at: At) -> None:
        self._expect("[")
        for index in count():
            self._skip(_BLANK)
            if self._text.startswith("]", self._pos):
                break
            self.lines.setdefault((*at, index), self._line)
            self._value((*at, index))
            self._comma()
        self._expect("]")

    def _inline_table(self, at: At) -> None:
        self._expect("{")
        self._skip(_BLANK)
        while not self._text.startswith("}", self._pos):
            self._pair(at)
            self._comma()
        self._expect("}")

    def _comma(self) -> None:
        self._skip(_BLANK)
        if self._text.startswith(",", self._pos):
            self._expect(",")
        self._skip(_BLANK)

    def _expect(self, token: str) -> None:
        if not self._text.startswith(token, self._pos):
            raise _Lost
        self._pos += len(token)

    def _require(self, pattern: re.Pattern[str]) -> str:
        found = self._skip(pattern)
        if not found:
            raise _Lost
        return found

    def _skip(self, pattern: re.Pattern[str]) -> str:
        """Move behind what the pattern matches here and return it; "" where it does not match."""
        match = pattern.match(self._text, self._pos)
        found = match.group() if match else ""
        self._pos += len(found)
        self._line += found.count("\n")
        return found
