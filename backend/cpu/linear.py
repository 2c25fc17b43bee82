"""Matrix products on the CPU: each weight is brought once into the form that its kernel reads fastest.

Float32 and bfloat16 go through oneDNN with prepacked weights, dequantized ones included. In bfloat16, blocks of 4-bit
codes also stay in torch's int4 layout for the few-row steps that are bound by reading weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from backend.cpu.packed import PackedWeight
from backend.quant.affine import AffineWeight, stacked
from backend.quant.blocks import FOUR_BIT_KINDS
from backend.quant.w4 import quantize_w4

Linear = Callable[[Tensor], Tensor]  # [T, cols] -> [T, rows], in the dtype of the input

_TYPICAL_ROWS = (
    32  # oneDNN lays weights out for this many rows; measured best from 1 to 128, "1" is not
)
W4_GROUP = 32
W4_PANEL_ROWS = 16
W4_MAX_ROWS = 4  # beyond, dequantize-free bfloat16 products read no more and compute faster


def make_linear(weights: Sequence[PackedWeight], dtype: torch.dtype) -> Linear:
    """One product for several stacked matrices of equal width (q, k and v; gate and up)."""
    linear = _unobserved_linear(weights, dtype)
    observers = [weight.observer for weight in weights if weight.observer is not None]
    return ObservedLinear(linear, observers) if observers else linear


def _unobserved_linear(weights: Sequence[PackedWeight], dtype: torch.dtype) -> Linear:
    kinds = {weight.kind for weight in weights}
    matrix = torch.cat([weight.dequantize() for weight in weights])
    if dtype == torch.bfloat16 and not has_prepacked_linear(dtype):
        wide: Linear = WidenedLinear(DenseLinear(matrix))
    else:
        wide = DenseLinear(matrix.to(dtype))
    if dtype == torch.bfloat16 and fits_int4(kinds, matrix.shape[0]) and has_int4_linear():
        return FewRowsLinear(Int4Linear(stacked([weight.affine() for weight in weights])), wide)
    return wide


def fits_int4(kinds: Iterable[str], rows: int) -> bool:
    """The 4-bit kernel wants 4-bit codes and whole panels of 16 rows; others stay dense."""
    return FOUR_BIT_KINDS.issuperset(kinds) and rows % W4_PANEL_ROWS == 0


class DenseLinear:
    """x @ w.T in the weight's own dtype, through a prepacked oneDNN weight where this torch has it."""

    def __init__(self, weight: Tensor) -> None:
        self._prepacked = has_prepacked_linear(weight.dtype)
        if self._prepacked:
            weight = torch.ops.mkldnn._reorder_linear_weight(weight, _TYPICAL_ROWS)
        self._weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        if self._prepacked:
            return torch.ops.mkldnn._linear_pointwise(x, self._weight, None, "none", [], None)
        return F.linear(x, self._weight)


class ObservedLinear:
    """Shows its inputs to those who want to know what a matrix meets: calibration."""

    def __init__(self, linear: Linear, observers: Sequence[Callable[[Tensor], object]]) -> None:
        self._linear, self._observers = linear, observers

    def __call__(self, x: Tensor) -> Tensor:
        for observe in self._observers:
            observe(x)
        return self._linear(x)


class WidenedLinear:
    """For processors without bfloat16 products: they emulate them ten times slower than they compute in float32."""

    def __init__(self, exact: Linear) -> None:
        self._exact = exact

    def __call__(self, x: Tensor) -> Tensor:
        return self._exact(x.float()).to(x.dtype)


class Int4Linear:
    """bfloat16 rows times a 4-bit weight; scale and offset per 32 columns of each row."""

    def __init__(self, weight: AffineWeight) -> None:
        """weight: codes 0..15 in groups of a multiple of 32."""
        weight = weight.regrouped(W4_GROUP)
        self._packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(weight.codes.int(), 1)
        middle = weight.offset + 8 * weight.scale  # the kernel computes (code - 8) * scale + middle
        scales = torch.stack((weight.scale, middle), -1)
        self._scales = scales.transpose(0, 1).contiguous().bfloat16()

    def __call__(self, x: Tensor) -> Tensor:
        return torch.ops.aten._weight_int4pack_mm_for_cpu(x, self._packed, W4_GROUP, self._scales)


class FewRowsLinear:
    """Two forms of one weight: 4-bit for steps of a few rows, bfloat16 for the rest."""

    def __init__(self, narrow: Linear, wide: Linear) -> None:
        self._narrow, self._wide = narrow, wide

    def __call__(self, x: Tensor) -> Tensor:
        return self._narrow(x) if x.shape[0] <= W4_MAX_ROWS else self._wide(x)


@cache
def has_prepacked_linear(dtype: torch.dtype) -> bool:
    """Whether the private oneDNN operators are there and right; they have no stability promise."""
    weight, x = torch.randn(64, 32, dtype=dtype), torch.randn(3, 32, dtype=dtype)
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, _TYPICAL_ROWS)
        out = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], None)
    except (AttributeError, RuntimeError):
        return False
    return torch.allclose(out, F.linear(x, weight), rtol=1e-2, atol=1e-2)


@cache
def has_int4_linear() -> bool:
    """Whether torch's private 4-bit operators are there and right."""
    weight = quantize_w4(torch.randn(W4_PANEL_ROWS, W4_GROUP), W4_GROUP)
    x = torch.randn(2, W4_GROUP).bfloat16()
    try:
        out = Int4Linear(weight)(x).float()
    except (AttributeError, RuntimeError):
        return False
    return torch.allclose(out, F.linear(x.float(), weight.dequantize()), rtol=0.1, atol=0.5)
