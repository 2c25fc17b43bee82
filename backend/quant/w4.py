"""W4: codes 0..15, a scale and an offset for each group of 32, 64 or 128 columns: w = scale * code + offset.

The grid starts between a group's least and greatest value and is then refitted to the codes by least squares, which
is what llama.cpp's Q4_K quantizer does too; a group keeps the refit only where its squared error falls.
"""

from __future__ import annotations

import torch
from torch import Tensor

from backend.quant.affine import AffineWeight, half_where_possible

GROUP_SIZES = (32, 64, 128)
MAX_CODE = 15
_CHUNK_ELEMENTS = 1 << 15  # temporaries stay in the cache, and torch starts no threads for them


def quantize_w4(
    weight: Tensor, group_size: int = 32, importance: Tensor | None = None
) -> AffineWeight:
    """weight: float32 [rows, cols], finite, cols a multiple of `group_size`.

    importance: float32 [cols], the mean square of the input that each column meets; None: all alike.
    """
    counts = torch.ones(weight.shape[1]) if importance is None else importance
    parts = [
        _quantize_rows(rows, group_size, counts)
        for rows in weight.split(max(1, _CHUNK_ELEMENTS // weight.shape[1]))
    ]
    codes, scale, offset = (torch.cat(part) for part in zip(*parts, strict=True))
    return AffineWeight(codes, scale, offset)


def _quantize_rows(weight: Tensor, group_size: int, counts: Tensor) -> tuple[Tensor, ...]:
    """Codes int8 [rows, cols], scale and offset [rows, groups]."""
    rows, cols = weight.shape
    grouped = weight.view(rows, cols // group_size, group_size)
    counts = counts.view(cols // group_size, group_size)
    low, high = grouped.amin(-1), grouped.amax(-1)
    scale, offset = half_where_possible((high - low) / MAX_CODE), half_where_possible(low)
    codes = _codes(grouped, scale, offset)
    fit_scale, fit_offset = map(half_where_possible, _least_squares(grouped, codes, counts))
    fit_codes = _codes(grouped, fit_scale, fit_offset)
    error = _error(grouped, codes, scale, offset, counts)
    better = _error(grouped, fit_codes, fit_scale, fit_offset, counts) < error
    codes = torch.where(better[..., None], fit_codes, codes).view(rows, cols).to(torch.int8)
    return codes, torch.where(better, fit_scale, scale), torch.where(better, fit_offset, offset)


def _codes(grouped: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
    """float32 [rows, groups, group_size]"""
    steps = scale.clamp_min(torch.finfo(torch.float32).tiny)[..., None]
    return ((grouped - offset[..., None]) / steps).round_().clamp_(0, MAX_CODE)


def _error(grouped: Tensor, codes: Tensor, scale: Tensor, offset: Tensor, counts: Tensor) -> Tensor:
    """[rows, groups]"""
    miss = torch.addcmul(offset[..., None], codes, scale[..., None]).sub_(grouped)
    return (miss.square_() * counts).sum(-1)


def _least_squares(grouped: Tensor, codes: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """The scale and offset [rows, groups] with the least weighted squared error for these codes."""
    total = counts.sum(-1).clamp_min(torch.finfo(torch.float32).tiny)
    mean_code = (codes * counts).sum(-1) / total
    mean = (grouped * counts).sum(-1) / total
    from_mean = codes - mean_code[..., None]
    spread = (from_mean.square() * counts).sum(-1)
    scale = (from_mean * grouped * counts).sum(-1) / spread.clamp_min(1e-12)
    return scale, mean - scale * mean_code
