"""Small random matrices in any block format."""

from __future__ import annotations

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import quantize

from backend.cpu.packed import PackedWeight, pack, pack_affine
from backend.quant.affine import AffineWeight
from backend.quant.ggml import KINDS
from backend.quant.w4 import quantize_w4
from backend.quant.w8 import quantize_w8


def random_weight(kind: str, rows: int, cols: int, seed: int = 0) -> PackedWeight:
    values = torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)) / cols**0.5
    dtypes = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    if kind in dtypes:
        return pack(values.to(dtypes[kind]))
    if kind in ("W4", "W8"):  # scales that no half holds
        made = quantize_w4(values) if kind == "W4" else quantize_w8(values, 16)
        return pack_affine(AffineWeight(made.codes, made.scale / 3, made.offset / 3 + 0.01), kind)
    raw = quantize(values.numpy(), GGMLQuantizationType[kind])
    return PackedWeight(kind, np.ascontiguousarray(raw), (rows, cols))


def extreme_weight(kind: str, rows: int, cols: int) -> PackedWeight:
    """Scale 1, and codes of the largest size; the first two rows have one sign throughout."""
    signs = np.random.default_rng(0).integers(0, 2, (rows, cols // 32, 32))
    signs[0], signs[1] = 0, 1
    one = np.float32(1) if kind == "W4" else np.float16(1)
    head = np.tile(np.frombuffer(one.tobytes(), np.uint8), (rows, cols // 32, 1))
    if kind == "Q8_0":
        body = np.where(signs, 127, -128).astype(np.int8).view(np.uint8)
    else:
        nibbles = np.where(signs, 15, 0).astype(np.uint8)
        body = nibbles[..., :16] | nibbles[..., 16:] << 4
        head = np.concatenate([head] * (2 if kind in ("Q4_1", "W4") else 1), axis=-1)
    raw = np.concatenate([head, body], axis=-1).reshape(rows, -1)
    return PackedWeight(kind, np.ascontiguousarray(raw), (rows, cols))


def random_rows(rows: int, cols: int) -> torch.Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(1))


# Where the halves lie in a block, if not at its beginning alone.
_HALVES = {
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}
GGUF_BLOCKS = sorted(KINDS | {"Q4_0", "Q4_1", "Q8_0"})


def random_blocks(kind: str, rows: int = 3) -> PackedWeight:
    """Two blocks a row. Any bytes are a block of any GGUF kind, but for the halves in it, which must be finite."""
    cols, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    generator = np.random.default_rng(GGUF_BLOCKS.index(kind))
    blocks = generator.integers(0, 256, (rows * 2, block_bytes), dtype=np.uint8)
    halves = generator.uniform(-2, 2, (rows * 2, 2)).astype(np.float16).view(np.uint8)
    for at, place in enumerate(_HALVES.get(kind, (0,))):
        blocks[:, place : place + 2] = halves[:, 2 * at : 2 * at + 2]
    return PackedWeight(kind, blocks.reshape(rows, -1), (rows, 2 * cols))
