"""W8: w = scale * code, int8 codes and one scale for each output channel (row) or group of columns: max|w| / 127."""

from __future__ import annotations

import torch
from torch import Tensor

from backend.quant.affine import AffineWeight, half_where_possible

MAX_CODE = 127


def quantize_w8(weight: Tensor, group_size: int | None = None) -> AffineWeight:
    """weight: float32 [rows, cols], finite. group_size: a divisor of cols; None: the whole row. Zeros have scale 0."""
    rows, cols = weight.shape
    grouped = weight.reshape(rows, -1, group_size or cols)
    scale = half_where_possible(grouped.abs().amax(-1) / MAX_CODE)
    codes = grouped / scale.clamp_min(torch.finfo(torch.float32).tiny)[..., None]
    codes = codes.round_().clamp_(-MAX_CODE, MAX_CODE).to(torch.int8)
    return AffineWeight(codes.view(rows, cols), scale, torch.zeros_like(scale))
