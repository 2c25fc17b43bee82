"""Block formats of GGUF files that are not ours too, as groups of codes (ggml-quants.c of llama.cpp), exactly.

Every scale and offset is a product of a half and a small integer, which float32 holds; so `dequantize` of the groups
equals the formula of the format up to the last rounding. K-quants are blocks of 256 columns in groups of 16 or 32.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from backend.quant.affine import AffineWeight

# The 16 levels of IQ4 codes.
_LEVELS = torch.tensor(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=torch.int8
)

Parts = tuple[Tensor, Tensor, Tensor]  # codes [n, cols], scale [n, groups], offset [n, groups]


def unpack_ggml(kind: str, raw: np.ndarray) -> AffineWeight:
    """raw: uint8 [rows, bytes of a row], whole blocks of `kind`, one of KINDS."""
    block_bytes, unpack = _FORMATS[kind]
    blocks = torch.from_numpy(raw.copy()).view(-1, block_bytes)
    codes, scale, offset = (part.reshape(len(raw), -1) for part in unpack(blocks))
    return AffineWeight(codes.to(torch.int8), scale, offset)


def _half(blocks: Tensor, at: int) -> Tensor:
    """float32 [n, 1]"""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _signed(data: Tensor) -> Tensor:
    return data.contiguous().view(torch.int8)


def _fields(data: Tensor, bits: int, run: int) -> Tensor:
    """uint8 [n, m] -> [n, m * 8 / bits]: of each run of bytes all the lowest `bits`, then all the next, and so on."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)[:, None]
    fields = data.reshape(len(data), -1, 1, run) >> shifts & ((1 << bits) - 1)
    return fields.flatten(1)


def _high_bits(data: Tensor) -> Tensor:
    """uint8 [n, 4]: bit i of the little-endian word is that of column i -> [n, 32]."""
    return (data[..., None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten(1)


def _plain(scale: Tensor, codes: Tensor) -> Parts:
    return codes, scale, torch.zeros_like(scale)


def _q5_0(b: Tensor) -> Parts:
    codes = _fields(b[:, 6:], 4, 16) | _high_bits(b[:, 2:6]) << 4
    return _plain(_half(b, 0), _signed(codes) - 16)


def _q5_1(b: Tensor) -> Parts:
    return _fields(b[:, 8:], 4, 16) | _high_bits(b[:, 4:8]) << 4, _half(b, 0), _half(b, 2)


def _q2_k(b: Tensor) -> Parts:
    scales = b[:, :16]
    return (
        _fields(b[:, 16:80], 2, 32),
        _half(b, 80) * (scales & 15).float(),
        -_half(b, 82) * (scales >> 4).float(),
    )


def _q3_k(b: Tensor) -> Parts:
    high = _fields(b[:, :32], 1, 32)
    codes = _signed(_fields(b[:, 32:96], 2, 32) | high << 2) - 4
    scales = _fields(b[:, 96:104], 4, 8) | _fields(b[:, 104:108], 2, 4) << 4
    return _plain(_half(b, 108) * (_signed(scales) - 32).float(), codes)


def _six_bit_scales(data: Tensor) -> tuple[Tensor, Tensor]:
    """uint8 [n, 12] -> eight scales and eight offsets of 6 bits, as Q4_K and Q5_K pack them."""
    first, second, third = data.view(-1, 3, 4).unbind(1)
    scales = torch.cat((first & 63, third & 15 | first >> 6 << 4), 1)
    offsets = torch.cat((second & 63, third >> 4 | second >> 6 << 4), 1)
    return scales.float(), offsets.float()


def _q4_k(b: Tensor) -> Parts:
    scales, offsets = _six_bit_scales(b[:, 4:16])
    return _fields(b[:, 16:], 4, 32), _half(b, 0) * scales, -_half(b, 2) * offsets


def _q5_k(b: Tensor) -> Parts:
    scales, offsets = _six_bit_scales(b[:, 4:16])
    codes = _fields(b[:, 48:], 4, 32) | _fields(b[:, 16:48], 1, 32) << 4
    return codes, _half(b, 0) * scales, -_half(b, 2) * offsets


def _q6_k(b: Tensor) -> Parts:
    codes = _signed(_fields(b[:, :128], 4, 64) | _fields(b[:, 128:192], 2, 32) << 4) - 32
    return _plain(_half(b, 208) * _signed(b[:, 192:208]).float(), codes)


def _iq4_nl(b: Tensor) -> Parts:
    return _plain(_half(b, 0), _LEVELS[_fields(b[:, 2:], 4, 16).int()])


def _iq4_xs(b: Tensor) -> Parts:
    low = _fields(b[:, 4:8, None].flatten(1), 4, 1)
    high = _fields(b[:, 2:4], 2, 1)
    scales = _half(b, 0) * (_signed(low | high << 4) - 32).float()
    return _plain(scales, _LEVELS[_fields(b[:, 8:], 4, 16).int()])


_FORMATS: dict[str, tuple[int, Callable[[Tensor], Parts]]] = {
    "Q5_0": (22, _q5_0),
    "Q5_1": (24, _q5_1),
    "Q2_K": (84, _q2_k),
    "Q3_K": (110, _q3_k),
    "Q4_K": (144, _q4_k),
    "Q5_K": (176, _q5_k),
    "Q6_K": (210, _q6_k),
    "IQ4_NL": (18, _iq4_nl),
    "IQ4_XS": (136, _iq4_xs),
}
KINDS = frozenset(_FORMATS)
