"""How groups of codes lie in memory: rows of equal blocks, the form in which weights are kept and computed on.

| kind | columns | bytes of a block | holds exactly |
|---|---|---|---|
| Q8_0 | 32 | d float16, 32 int8 | int8 codes, float16 scales, no offset |
| Q4_0 | 32 | d float16, 16 of nibbles | 4-bit codes, float16 scales, offset -8 d |
| Q4_1 | 32 | d, m float16, 16 of nibbles | 4-bit codes, float16 scales and offsets |
| W4 | 32 | d, m float32, 16 of nibbles | any 4-bit codes |
| W8 | 16 | d, m float32, 16 int8 | any codes |

w = d * code + m. The first three are GGUF's; a nibble byte i holds column i (low half) and column i + 16.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from backend.quant.affine import AffineWeight

Q_COLS = 32
W8_COLS = 16
KINDS = ("Q8_0", "Q4_0", "Q4_1", "W4", "W8")
FOUR_BIT_KINDS = frozenset(("Q4_0", "Q4_1", "W4", "Q4_K"))


def smallest_kind(weight: AffineWeight) -> str:
    """The smallest kind that holds the weight exactly; W8 holds all."""
    if weight.group_size % Q_COLS:
        return "W8"
    halves = _is_half(weight.scale)
    if not weight.is_four_bit:
        return "Q8_0" if halves and not weight.offset.any() else "W8"
    if halves and torch.equal(weight.offset, -8 * weight.scale):
        return "Q4_0"
    return "Q4_1" if halves and _is_half(weight.offset) else "W4"


def pack_blocks(weight: AffineWeight, kind: str) -> np.ndarray:
    """uint8 [rows, bytes of a row]. Groups that are larger than the kind's are repeated.

    ValueError where the columns are no whole number of blocks.
    """
    rows, cols = weight.codes.shape
    block_cols = W8_COLS if kind == "W8" else Q_COLS
    if cols % block_cols or weight.group_size % block_cols:
        raise ValueError(f"{cols} columns in groups of {weight.group_size} make no {kind} blocks")
    parts = weight.regrouped(block_cols)
    float_type = torch.float32 if kind.startswith("W") else torch.float16
    numbers = [parts.scale] if kind in ("Q8_0", "Q4_0") else [parts.scale, parts.offset]
    head = torch.stack(numbers, -1).to(float_type).view(torch.uint8)
    codes = parts.codes.view(rows, cols // block_cols, block_cols).view(torch.uint8)
    body = codes if kind in ("Q8_0", "W8") else codes[..., :16] | codes[..., 16:] << 4
    return torch.cat((head, body), -1).view(rows, -1).numpy()


def unpack_blocks(kind: str, raw: np.ndarray) -> AffineWeight:
    """The inverse of `pack_blocks`; groups are the blocks."""
    data = torch.from_numpy(raw.copy())  # mapped files are read-only, which torch warns of
    rows = data.shape[0]
    float_type = torch.float32 if kind.startswith("W") else torch.float16
    num_numbers = 1 if kind in ("Q8_0", "Q4_0") else 2
    head_bytes = num_numbers * float_type.itemsize
    body_bytes = Q_COLS if kind == "Q8_0" else 16
    blocks = data.view(rows, -1, head_bytes + body_bytes)
    numbers = blocks[..., :head_bytes].contiguous().view(float_type).float()
    body = blocks[..., head_bytes:]
    if kind not in ("Q8_0", "W8"):
        body = torch.cat((body & 15, body >> 4), -1)
    scale = numbers[..., 0].contiguous()
    offset = {"Q8_0": torch.zeros_like(scale), "Q4_0": -8 * scale}.get(kind, numbers[..., -1])
    codes = body.contiguous().view(torch.int8).view(rows, -1)
    return AffineWeight(codes, scale, offset.contiguous())


def _is_half(values: Tensor) -> bool:
    return torch.equal(values.half().float(), values)
