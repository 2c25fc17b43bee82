"""W8A8: int8 weights (as W8) times int8 inputs: y = x_scale * w_scale * sum over columns of x_code * w_code.

Each token (row of x) has its own scale, max|x| / 127, found when it is met: one scale for a whole step would let a
neighbour's outliers ruin a row (vLLM issue 1112), and a row would depend on its batch mates. The integer sums are
exact, so a row has the same bits in any batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from backend.quant.affine import AffineWeight

MAX_CODE = 127
# Sums of so many products of two codes stay below 2 ** 24: float32 adds them exactly, in any order.
EXACT_COLS = 1024


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x float [T, cols] -> codes, whole numbers in float32 [T, cols], and scale float32 [T, 1].

    A row that holds an infinity or a NaN comes out as NaN, so a broken model is still seen.
    """
    wide = x.float()
    scale = wide.abs().amax(-1, keepdim=True) / MAX_CODE
    return (wide / scale.clamp_min(torch.finfo(torch.float32).tiny)).round_(), scale


def w8a8_reference(x: Tensor, weight: AffineWeight) -> Tensor:
    """What a W8A8 product means, in plain torch.  x [T, cols], weight [rows, cols] of `quantize_w8` -> [T, rows]."""
    codes, scale = quantize_rows(x)
    sums = (codes.double() @ weight.codes.double().T).float()
    return (sums * scale * weight.scale.T).to(x.dtype)
