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


def random_rows(rows: int, cols: int) -> torch.Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(1))
