"""The rejection step of speculative sampling (Leviathan et al., 2023; Chen et al., 2023)."""

from __future__ import annotations

import numpy as np


def accept_or_resample(
    target: np.ndarray, draft: np.ndarray, guess: int, uniform: float, exponentials: np.ndarray
) -> int:
    """A token whose law is exactly `target`, given a `guess` that was drawn from `draft`.

    Both laws are probabilities [vocab_size]; `uniform` is in (0, 1), `exponentials` [vocab_size] are standard
    exponential variates, all independent of the guess. Accepts with min(1, target / draft); else draws from what
    `target` has above `draft`. A guess that was certain is a `draft` with all its weight in one place.
    """
    if uniform * draft[guess] < target[guess]:
        return guess
    residual = np.maximum(target - draft, 0.0)
    left = np.flatnonzero(residual)
    if not len(left):  # equal laws: only rounding can have rejected
        return guess
    return int(left[(exponentials[left] / residual[left]).argmin()])
