"""Weights in the panels that `native.cpp` reads, and one product for tests and measurements."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from backend.cpu.native import native_library
from backend.cpu.native_abi import Matrix
from backend.cpu.packed import PackedWeight, in_one_kind

# In the order of `enum Kind`.
KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "W4", "W8")
_ARENA_BYTES = 64 << 20
_ALIGN = 64


def huge_pages(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Uninitialized memory on large pages where the system grants them; it is committed when first written."""
    tensor = torch.empty(tuple(shape), dtype=dtype)
    native_library().tidegate_use_huge_pages(
        tensor.data_ptr(), tensor.numel() * tensor.element_size()
    )
    return tensor


class Arena:
    """Room for many matrices side by side, so that large pages span them."""

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def take(self, num_bytes: int) -> Tensor:
        if self._used + num_bytes > self._chunk.numel():
            self._chunk = huge_pages([max(_ARENA_BYTES, num_bytes)], torch.uint8)
            self._used = 0
        start = self._used
        self._used = start + -(-num_bytes // _ALIGN) * _ALIGN
        return self._chunk[start : start + num_bytes]


@dataclass(frozen=True, slots=True, eq=False)
class NativeMatrix:
    """One packed matrix `[rows, cols]`; `struct` points into `data`, so keep the object while it is in use."""

    struct: Matrix
    data: Tensor

    @property
    def num_bytes(self) -> int:
        return self.data.numel()


def pack_matrix(
    weights: Sequence[PackedWeight], order: np.ndarray | None = None, arena: Arena | None = None
) -> NativeMatrix:
    """Stack matrices of equal width and bring them into panels; row i is row `order[i]` of the stack.

    A kind without a kernel, or a stack of mixed kinds, is kept in one that holds it exactly.
    """
    rows, cols = sum(w.shape[0] for w in weights), weights[0].shape[1]
    if any(w.shape[1] != cols for w in weights):
        raise ValueError(
            f"matrices of different widths cannot be stacked: {[w.shape for w in weights]}"
        )
    alike = in_one_kind(weights)
    raw = np.concatenate([w.raw for w in alike])
    order = np.arange(rows) if order is None else order
    if sorted(order.tolist()) != list(range(rows)):
        raise ValueError(f"order is no permutation of {rows} rows")
    return _packed(
        KINDS.index(alike[0].kind), np.ascontiguousarray(raw), order.astype(np.int64), cols, arena
    )


def _packed(
    kind: int, raw: np.ndarray, order: np.ndarray, cols: int, arena: Arena | None
) -> NativeMatrix:
    library, rows = native_library(), len(order)
    num_bytes = library.tidegate_packed_bytes(kind, rows, cols)
    if num_bytes < 0:
        raise ValueError(f"a {KINDS[kind]} matrix of {rows} x {cols} cannot be packed")
    data = arena.take(num_bytes) if arena else torch.empty(num_bytes, dtype=torch.uint8)
    library.tidegate_pack(
        kind, raw.ctypes.data, raw.shape[1], order.ctypes.data, rows, cols, data.data_ptr()
    )
    return NativeMatrix(Matrix(kind, rows, cols, 0, data.data_ptr(), None), data)


def native_linear(
    x: Tensor, weight: NativeMatrix, threads: int = 1, *, byte_activations: bool = False
) -> Tensor:
    """float32 x [T, cols] -> x @ weight.T [T, rows]. Starts threads of its own: for tests and measurements.

    `byte_activations`: x as `activations.rounded_to_bytes` gives it, where the weight is in blocks.
    """
    if x.dtype != torch.float32 or x.dim() != 2 or x.shape[1] != weight.struct.cols:
        raise ValueError(
            f"x must be float32 [T, {weight.struct.cols}], got {x.dtype} {list(x.shape)}"
        )
    x, y = x.contiguous(), torch.empty(x.shape[0], weight.struct.rows)
    if x.shape[0]:
        fault = native_library().tidegate_linear(
            ctypes.byref(weight.struct),
            x.data_ptr(),
            x.shape[0],
            y.data_ptr(),
            threads,
            byte_activations,
        )
        if fault:
            raise MemoryError(fault.decode())
    return y
