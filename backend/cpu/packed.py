"""Weights as the file holds them: rows of quantized blocks (GGUF's, or ours), dequantized only on demand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize as dequantize_blocks
from torch import Tensor

from backend.quant.affine import AffineWeight, stacked
from backend.quant.blocks import KINDS as OUR_KINDS
from backend.quant.blocks import pack_blocks, smallest_kind, unpack_blocks
from backend.quant.ggml import unpack_ggml

_FLOATS = ("F32", "F16", "BF16")
_BLOCKS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "IQ4_XS")
_K_BLOCKS = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
KINDS = frozenset((*_FLOATS, *_BLOCKS, *_K_BLOCKS))  # of GGUF files
_OURS_ALONE = frozenset(OUR_KINDS) - KINDS
_TIER_KINDS = frozenset((*_FLOATS, *OUR_KINDS))  # which the tiers compute on
_CHUNK_BYTES = 1 << 24


def bytes_per_row(kind: str, cols: int) -> int | None:
    """None: `cols` is no whole number of blocks of that kind."""
    block_cols, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    return None if cols % block_cols else cols // block_cols * block_bytes


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """One matrix `[rows, cols]` (a vector has one row) in the block format `kind`: one of GGUF's or of `quant.blocks`.

    `raw` is uint8 `[rows, bytes_per_row]`, often a read-only view of the mapped file.
    """

    kind: str
    raw: np.ndarray
    shape: tuple[int, int]
    observer: Callable[[Tensor], object] | None = None  # is shown what the matrix meets, [T, cols]

    def dequantize(self) -> Tensor:
        """float32 `[rows, cols]`, in memory of its own."""
        rows, cols = self.shape
        out = torch.empty(rows, cols)
        step = max(1, _CHUNK_BYTES // max(1, self.raw.shape[1]))
        for start in range(0, rows, step):  # in slices: the numpy formulas hold several copies
            out[start : start + step] = self._dequantize_rows(self.raw[start : start + step])
        return out

    def _dequantize_rows(self, raw: np.ndarray) -> Tensor:
        if self.kind in ("F32", "F16"):
            return torch.from_numpy(
                raw.view(np.float32 if self.kind == "F32" else np.float16).copy()
            )
        if self.kind == "BF16":
            return torch.from_numpy(raw.view(np.int16).copy()).view(torch.bfloat16)
        if self.kind in _OURS_ALONE:
            return unpack_blocks(self.kind, raw).dequantize()
        with np.errstate(all="ignore"):  # a damaged scale makes a damaged weight, no warning
            return torch.from_numpy(dequantize_blocks(raw, GGMLQuantizationType[self.kind]))

    def affine(self) -> AffineWeight:
        """Its groups of codes. For every kind but the floats."""
        unpack = unpack_blocks if self.kind in OUR_KINDS else unpack_ggml
        return unpack(self.kind, self.raw)

    def rows_permuted(self, order: np.ndarray) -> PackedWeight:
        """The same weight with its rows in another order; blocks lie within rows, so no value changes."""
        return replace(self, raw=self.raw[order])


def pack(tensor: Tensor) -> PackedWeight:
    """A float32, float16 or bfloat16 tensor of one or two dimensions, seen as a PackedWeight without a copy."""
    kind = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}[tensor.dtype]
    matrix = tensor.contiguous().reshape(-1, tensor.shape[-1])
    return PackedWeight(kind, matrix.view(torch.uint8).numpy(), (matrix.shape[0], matrix.shape[1]))


def in_one_kind(weights: Sequence[PackedWeight]) -> list[PackedWeight]:
    """Matrices to be stacked, in one kind of `quant.blocks` or of floats that holds them all exactly.

    Among floats of several kinds, or floats and blocks, that is F32.
    """
    kinds = {weight.kind for weight in weights}
    if len(kinds) == 1 and kinds <= _TIER_KINDS:
        return list(weights)
    if any(weight.kind in _FLOATS for weight in weights):
        return [pack(weight.dequantize()) for weight in weights]
    return [pack_affine(stacked([weight.affine() for weight in weights]))]


def pack_affine(weight: AffineWeight, kind: str | None = None) -> PackedWeight:
    """Groups of codes in the smallest kind of blocks that holds them exactly, or in the one asked for.

    ValueError where the columns are no whole number of blocks.
    """
    kind = kind or smallest_kind(weight)
    rows, cols = weight.codes.shape
    return PackedWeight(kind, pack_blocks(weight, kind), (rows, cols))
