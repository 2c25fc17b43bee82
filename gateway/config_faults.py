"""Faults of a configuration: all of them are collected, each becomes one line that says where and what."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping

At = tuple[str | int, ...]
"""Where in the file: ("models", 0, "targets", 1) is `models[0].targets[1]`."""

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


class ConfigFaults(Exception):
    """The start is refused. `lines` holds one line for each fault; none holds a secret's value."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__("\n".join(lines))
        self.lines = lines


class Faults:
    """Collects faults of one file. `label` is how the file is called in messages, such as `config.toml`."""

    def __init__(self, label: str, key_lines: Mapping[At, int]) -> None:
        self._label = label
        self._key_lines = key_lines
        self._found: dict[tuple[At, str], int] = {}

    def add(self, at: At, message: str) -> None:
        self._found.setdefault((at, " ".join(message.split())), self._line_of(at))

    def touch(self, at: At) -> bool:
        """Whether something at or above this place was found faulty already."""
        return any(at[: len(found)] == found for found, _ in self._found)

    def raise_if_any(self) -> None:
        if self._found:
            in_order = sorted(self._found.items(), key=lambda item: item[1])
            raise ConfigFaults(
                [self._render(at, message, line) for (at, message), line in in_order]
            )

    def _line_of(self, at: At) -> int:
        """The line of the key itself, else of the nearest table around it; 0 = not in the file."""
        return next(
            (line for n in range(len(at), 0, -1) if (line := self._key_lines.get(at[:n]))), 0
        )

    def _render(self, at: At, message: str, line: int) -> str:
        place = f"{self._label}:{line}" if line else self._label
        return f"{place}: {key_path(at)}: {message}" if at else f"{place}: {message}"


def key_path(at: At) -> str:
    """`at` as people write it: models[0].targets[1]; odd keys are quoted."""
    text = ""
    for part in at:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += ("." if text else "") + (part if _BARE_KEY.fullmatch(part) else repr(part))
    return text


def nearest(name: str, known: Iterable[str]) -> str:
    """`; nearest: x` for the known name that looks most like `name`; "" where there is none to offer.

    A close spelling wins; otherwise the one that shares the most letters is still the best hint.
    """
    options = sorted(known)
    if not options:
        return ""
    close = difflib.get_close_matches(name, options, n=1)
    matcher = difflib.SequenceMatcher(None, name)
    return f"; nearest: {close[0] if close else max(options, key=lambda o: _alike(matcher, o))}"


def _alike(matcher: difflib.SequenceMatcher[str], option: str) -> float:
    matcher.set_seq2(option)
    return matcher.quick_ratio()
