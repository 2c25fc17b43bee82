"""AWQ matrices in AutoAWQ's "gemm" layout: w[out, in] = scale[g, out] * (code[in, out] - zero[g, out]), 4 bits.

`qweight` int32 [in, out / 8] and `qzeros` int32 [groups, out / 8] hold eight successive outputs in a word,
interleaved: its fields, from the lowest bits up, are outputs 0 2 4 6 1 3 5 7. `scales` is [groups, out];
g = in // group_size.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from backend.quant.affine import AffineWeight

_FIELD_OF_OUTPUT = (0, 4, 1, 5, 2, 6, 3, 7)


def read_awq(parts: Mapping[str, Tensor]) -> AffineWeight:
    """`parts`: the tensors qweight, qzeros and scales of one matrix.

    Raises ValueError, in one line, for other shapes.
    """
    scales = parts["scales"].float()
    codes, zeros = _unpacked(parts["qweight"]), _unpacked(parts["qzeros"])
    if zeros.shape != scales.shape or codes.shape[1] != scales.shape[1]:
        shapes = [list(part.shape) for part in (codes, zeros, scales)]
        raise ValueError(f"codes, zero points and scales of 4 bits do not fit together: {shapes}")
    if len(codes) % len(scales):
        raise ValueError(f"{len(scales)} groups do not share {len(codes)} inputs evenly")
    return AffineWeight(codes.T.contiguous(), scales.T, (-zeros * scales).T)


def _unpacked(words: Tensor) -> Tensor:
    """int32 [n, m] -> int8 [n, 8 m], outputs in order."""
    shifts = 4 * torch.tensor(_FIELD_OF_OUTPUT, dtype=torch.int32)
    return ((words[..., None] >> shifts) & 15).flatten(1).to(torch.int8)
