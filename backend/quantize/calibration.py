"""What each matrix of a model meets on a text: the mean square of every input column.

A column that meets large inputs costs more per unit of rounding error, so the grid of a group is fitted with the
errors of its columns weighted by these (the diagonal of the second moment that AWQ, https://arxiv.org/abs/2306.00978,
and llama.cpp's importance matrix use too).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from backend.cpu.packed import PackedWeight
from backend.models.loader import load_model
from backend.perplexity import perplexity
from backend.quant.weights import is_quantized


class InputMoments:
    """Mean squares by the transformers name of the matrix, as far as the model was run."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._rows: dict[str, int] = {}

    def watch(self, name: str, weight: PackedWeight) -> PackedWeight:
        """The same weight, whose inputs will be counted if it is one of those that get quantized."""
        return replace(weight, observer=partial(self._add, name)) if is_quantized(name) else weight

    def importance(self, name: str) -> Tensor | None:
        """float32 [cols]; None: the matrix met nothing (an expert that was never chosen)."""
        rows = self._rows.get(name, 0)
        return self._sums[name] / rows if rows else None

    def _add(self, name: str, x: Tensor) -> None:
        squares = x.float().square().sum(0)
        self._sums[name] = self._sums.get(name, torch.zeros_like(squares)) + squares
        self._rows[name] = self._rows.get(name, 0) + x.shape[0]


def calibrate(path: Path, text: str, *, note: Callable[[int], object]) -> InputMoments:
    """Run the float32 model over the text, in windows; `note` is told how many tokens were seen.

    Raises:
        ModelLoadError: the model cannot be read.
        ValueError: the text has fewer than two tokens.
    """
    moments = InputMoments()
    loaded = load_model(path, dtype="float32", native=False, convert=moments.watch)
    perplexity(loaded.model, loaded.tokenizer, text, note=note)
    return moments
