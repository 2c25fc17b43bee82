"""Token bytes to text that is safe to show: whole characters only, and no part of a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol


class EngineTokenizer(Protocol):
    """What the engine needs of a tokenizer: the way back from ids to bytes."""

    vocab_size: int
    eos_ids: frozenset[int]

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes of a token; empty for special and control tokens."""
        ...

    def is_special(self, token_id: int) -> bool: ...


class Detokenizer:
    """The text of one request, piece by piece. The pieces joined are the whole text, however they were cut.

    Bytes that cannot become a character come out as U+FFFD (one per maximal ill-formed run, as the Unicode
    standard advises), a character cut off by the end of generation too. When several stop strings match,
    the one whose last character comes first wins: the only rule that gives the same text however tokens
    arrive. If two end together, the longer one wins.
    """

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self.matched_stop: str | None = (
            None  # set once; nothing is shown from its first character on
        )
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._matchers = [_Matcher(text) for text in sorted(stop, key=len, reverse=True)]
        self._held = ""  # may turn out to be the beginning of a stop string

    def push(self, data: bytes, *, match_stop: bool = True) -> str:
        """Text that these bytes make safe to show. `match_stop=False`: too early in the output to stop."""
        return self._release(self._decode(data), match_stop)

    def finish(self, *, match_stop: bool = True) -> str:
        """The rest, once no more tokens come."""
        text = self._release(self._decode(b"", True), match_stop)
        held, self._held = self._held, ""
        return text + held

    def _release(self, new: str, match_stop: bool) -> str:
        if not self._matchers or self.matched_stop is not None:
            return new if self.matched_stop is None else ""
        if not match_stop:
            return new
        text = self._held + new
        end = self._find_stop(new)
        if self.matched_stop is not None:
            self._held = ""
            return text[: len(text) - len(new) + end - len(self.matched_stop)]
        num_held = max(matcher.length for matcher in self._matchers)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def _find_stop(self, new: str) -> int:
        """Where in `new` the first completed stop string ends; sets `matched_stop`."""
        for index, char in enumerate(new):
            for matcher in self._matchers:  # longest first
                if matcher.advance(char):
                    self.matched_stop = matcher.text
                    return index + 1
        return 0


class _Matcher:
    """Knuth-Morris-Pratt: how long a beginning of `text` the characters seen so far end with."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.length = 0
        self._fallback = [0] * len(
            text
        )  # of text[:i + 1]: its longest proper prefix that is also its suffix
        length = 0
        for i in range(1, len(text)):
            while length and text[i] != text[length]:
                length = self._fallback[length - 1]
            length += text[i] == text[length]
            self._fallback[i] = length

    def advance(self, char: str) -> bool:
        """True when `char` completes the stop string."""
        while self.length and char != self.text[self.length]:
            self.length = self._fallback[self.length - 1]
        self.length += char == self.text[self.length]
        return self.length == len(self.text)
