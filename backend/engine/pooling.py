"""One vector for a whole prompt: the mean of its tokens' last hidden states, or the last token's, of length 1."""

from __future__ import annotations

import numpy as np

from backend.engine.params import Pooling


class Pooler:
    """Gathers one prompt's hidden states chunk by chunk; a chunk that is computed again counts once.

    The sum is kept in float64, so that where chunks end does not show in the float32 vector.
    """

    def __init__(self, pooling: Pooling, num_tokens: int, dimensions: int) -> None:
        self._num_tokens = num_tokens
        self._dimensions = dimensions
        self._num_pooled = 0 if pooling == "mean" else num_tokens - 1  # those before do not count
        self._sum = np.zeros(1)

    def num_wanted(self, start: int, end: int) -> int:
        """How many hidden states, the last ones, are wanted of the tokens `start` to `end`."""
        return max(0, end - max(start, self._num_pooled))

    def add(self, hidden: np.ndarray) -> None:
        """`hidden` [num_wanted, hidden_size] float32."""
        self._sum = self._sum + hidden.sum(axis=0, dtype=np.float64)
        self._num_pooled += len(hidden)

    def vector(self) -> np.ndarray | None:
        """[dimensions] float32, once every token is in -> None: the hidden states are not numbers.

        Fewer dimensions than the model has are its first ones, brought to length 1 again (Matryoshka representation
        learning, Kusupati et al., 2022; without such training they are a little worse than the whole).
        """
        assert self._num_pooled == self._num_tokens
        first = self._sum[: self._dimensions]
        length = np.linalg.norm(first)  # a mean differs from a sum in length only
        if not np.isfinite(length) or length == 0.0:
            return None
        return (first / length).astype(np.float32)
