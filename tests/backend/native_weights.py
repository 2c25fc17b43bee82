"""Small random matrices in any block format."""

from __future__ import annotations

import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import quantize

from backend.cpu.packed import PackedWeight, pack


def random_weight(kind: str, rows: int, cols: int, seed: int = 0) -> PackedWeight:
    values = torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)) / cols**0.5
    dtypes = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    if kind in dtypes:
        return pack(values.to(dtypes[kind]))
    raw = quantize(values.numpy(), GGMLQuantizationType[kind])
    return PackedWeight(kind, np.ascontiguousarray(raw), (rows, cols))


def extreme_weight(kind: str, rows: int, cols: int) -> PackedWeight:
    """Scale 1, and codes of the largest size; the first two rows have one sign throughout."""
    signs = np.random.default_rng(0).integers(0, 2, (rows, cols // 32, 32))
    signs[0], signs[1] = 0, 1
    one = np.broadcast_to(np.float16(1).tobytes(), (rows, cols // 32, 1))
    head = np.frombuffer(one.tobytes(), np.uint8).reshape(rows, cols // 32, 2)
    if kind == "Q8_0":
        body = np.where(signs, 127, -128).astype(np.int8).view(np.uint8)
    else:
        nibbles = np.where(signs, 15, 0).astype(np.uint8)
        body = nibbles[..., :16] | nibbles[..., 16:] << 4
        head = np.concatenate([head] * (2 if kind == "Q4_1" else 1), axis=-1)
    raw = np.concatenate([head, body], axis=-1).reshape(rows, -1)
    return PackedWeight(kind, np.ascontiguousarray(raw), (rows, cols))


def random_rows(rows: int, cols: int) -> torch.Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(1))
