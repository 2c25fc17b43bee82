"""Weights of any file brought into the format that was asked for, when a model is loaded or quantized.

Which weights: every matrix of a layer that multiplies all its inputs (attention and feed-forward projections, experts
included). The embedding, lm_head, norms, biases and the routers of experts stay as the file has them: together they
are few bytes of a large model, and errors in them are the ones that show.
"""

from __future__ import annotations

import re

from torch import Tensor

from backend.cpu.packed import PackedWeight, pack, pack_affine
from backend.quant.blocks import Q_COLS
from backend.quant.w4 import quantize_w4
from backend.quant.w8 import quantize_w8

FORMATS = ("w8", "w4")
_QUANTIZED = re.compile(r"\.layers\.\d+\..*(?:_proj|\.w[123])\.weight$")


def is_quantized(name: str) -> bool:
    """Whether the rule above takes the tensor of this transformers name."""
    return _QUANTIZED.search(name) is not None


def quantize_weight(
    weight: Tensor, to: str, group_size: int = 32, importance: Tensor | None = None
) -> PackedWeight:
    """weight: float32 [rows, cols] -> blocks of `to`, one of FORMATS.

    Args:
        group_size: of w4: 32, 64 or 128.
        importance: of w4: float32 [cols], the mean square of each column's input on calibration text.

    Raises:
        ValueError: in one line, for a width that is no whole number of groups, or a weight that is not finite.
    """
    cols = weight.shape[1]
    multiple = group_size if to == "w4" else Q_COLS
    if cols % multiple:
        raise ValueError(f"{to} needs a width that is a multiple of {multiple}, got {cols}")
    if not weight.isfinite().all():
        raise ValueError("a weight that is infinite or no number cannot be quantized")
    if to == "w4":
        return pack_affine(quantize_w4(weight, group_size, importance))
    return pack_affine(quantize_w8(weight))


def widened(weight: PackedWeight) -> PackedWeight:
    """Without any quantized block: what `quantization = "none"` computes on."""
    return weight if weight.kind in ("F32", "F16", "BF16") else pack(weight.dequantize())
