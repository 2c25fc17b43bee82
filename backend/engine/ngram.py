"""Prompt lookup: what followed the last few tokens when they came before (Saxena, 2023)."""

from __future__ import annotations

import numpy as np

MIN_MATCH = 2  # tokens that must have come before, in a row
MAX_MATCH = 16


class TokenHistory:
    """The tokens of one request in an array that grows with them."""

    def __init__(self) -> None:
        self._tokens = np.empty(256, np.int32)
        self._size = 0

    def continuation(self, token_ids: list[int], count: int) -> list[int]:
        """`count` tokens that followed the latest of the longest matches with the end; [] when nothing matches."""
        self._extend(token_ids)
        tokens = self._tokens[: self._size]
        if self._size <= MIN_MATCH:
            return []
        ends = np.flatnonzero(tokens[:-1] == tokens[-1])  # where a match ends
        for back in range(1, MAX_MATCH):
            longer = ends[ends >= back]
            longer = longer[tokens[longer - back] == tokens[self._size - 1 - back]]
            if not len(longer):
                if back < MIN_MATCH:
                    return []
                break
            ends = longer
        start = int(ends[-1]) + 1
        found = tokens[start : start + count].tolist()
        while len(found) < count:  # the match runs into the end: what repeats goes on repeating
            found.append(found[len(found) - (self._size - start)])
        return found

    def _extend(self, token_ids: list[int]) -> None:
        """A request's tokens never change, they only become more."""
        new = token_ids[self._size :]
        if len(token_ids) > len(self._tokens):
            self._tokens = np.resize(self._tokens, 2 * len(token_ids))
        self._tokens[self._size : len(token_ids)] = new
        self._size = len(token_ids)
