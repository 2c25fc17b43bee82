"""Drawing a token in the native library: the formulas of `backend.engine.sampler`, in one pass, not many."""

from __future__ import annotations

import ctypes
from functools import cache

import numpy as np

from backend.cpu.native import native_available, native_library
from backend.cpu.native_abi import DrawRule


class NativeDraw:
    """`logits` are contiguous float32 `[vocab_size]` without NaN; `peak` is the largest of them, and finite."""

    def __init__(self) -> None:
        library = native_library()
        self._draw = library.tidegate_draw
        self._weight = library.tidegate_weight
        self._likeliest = library.tidegate_likeliest

    def draw(
        self,
        logits: np.ndarray,
        peak: float,
        *,
        temperature: float,
        top_k: int,
        top_p: float,
        floor: float,
        key: int,
    ) -> int:
        """The winner of the race with the noise of `key`; ids with logits below `floor` do not run."""
        rule = DrawRule(temperature, top_p, peak, floor, min(top_k, len(logits)), 0, key)
        token_id = self._draw(_address(logits), len(logits), ctypes.byref(rule))
        if token_id < 0:
            raise MemoryError("no memory to draw a token")
        return token_id

    def weight(self, logits: np.ndarray, peak: float) -> float:
        """Sum of exp(logits - peak)."""
        return self._weight(_address(logits), len(logits), peak)

    def likeliest_ids(self, logits: np.ndarray, peak: float, count: int) -> np.ndarray:
        """int64 `[count]`, largest logit first, equal ones by rising id."""
        ids = np.empty(min(count, len(logits)), np.int64)
        if not self._likeliest(_address(logits), len(logits), peak, len(ids), _address(ids)):
            raise MemoryError("no memory for the likeliest tokens")
        return ids


@cache
def native_draw() -> NativeDraw | None:
    """None where there is no native tier; numpy then draws the same tokens."""
    return None if native_available() else NativeDraw()


def _address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]
