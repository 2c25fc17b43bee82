"""W8: int8 codes and one scale for each output channel (row): w = scale * code, scale = max|w| / 127."""

from __future__ import annotations

import torch
from torch import Tensor

from backend.quant.affine import AffineWeight, half_where_possible

MAX_CODE = 127


def quantize_w8(weight: Tensor) -> AffineWeight:
    """weight: float32 [rows, cols], finite. A row of zeros has scale 0."""
    scale = half_where_possible(weight.abs().amax(1, keepdim=True) / MAX_CODE)
    codes = weight / scale.clamp_min(torch.finfo(torch.float32).tiny)
    codes = codes.round_().clamp_(-MAX_CODE, MAX_CODE).to(torch.int8)
    return AffineWeight(codes, scale, torch.zeros_like(scale))
