"""Where one JSON object ends, however its text arrives."""

from __future__ import annotations

import re

_TURNS = re.compile(r'[{}\[\]"]')
_STRING_TURNS = re.compile(r'["\\]')


class JsonSpan:
    """Follows brackets and strings; whether the text between them is JSON is for a parser to say."""

    def __init__(self) -> None:
        self.is_complete = False
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def find_end(self, text: str) -> int | None:
        """Go on with `text` -> the index behind the object's last bracket, None while it is open."""
        at = 0
        while at < len(text) and not self.is_complete:
            if self._escaped:
                self._escaped, at = False, at + 1
                continue
            turn = (_STRING_TURNS if self._in_string else _TURNS).search(text, at)
            if turn is None:
                return None
            at = turn.end()
            self._turn(turn[0])
        return at if self.is_complete else None

    def _turn(self, char: str) -> None:
        if char == '"':
            self._in_string = not self._in_string
        elif char == "\\":
            self._escaped = True
        else:
            self._depth += 1 if char in "{[" else -1
            self.is_complete = self._depth <= 0
