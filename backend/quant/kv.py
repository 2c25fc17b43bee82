"""Keys and values in 8 bits: x = scale * code, with code = round(x / scale) and scale = max|x| / 127.

One scale for each token and KV head, so a row is quantized when it is written and never again, whatever its
neighbours. Attention needs no dequantized cache: a key's scale may be multiplied into its scores, a value's into
its probability.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_CODE = 127
SCALE_BYTES = 4


@dataclass(frozen=True, slots=True, eq=False)
class Int8Cache:
    """The keys or the values of one layer."""

    codes: Tensor  # int8 [KV, num_blocks, block_size, D]
    scales: Tensor  # float32 [KV, num_blocks, block_size]

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def device(self) -> torch.device:
        return self.codes.device


KVTensor = Tensor | Int8Cache


def quantize_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """rows [..., D] -> int8 codes [..., D], float32 scales [..., 1].

    A row that holds an infinity or no number dequantizes to no number everywhere, so a broken model is still seen.
    """
    wide = rows.float()
    scales = wide.abs().amax(-1, keepdim=True) / MAX_CODE
    codes = wide / scales.clamp_min(torch.finfo(torch.float32).tiny)
    return codes.round_().nan_to_num_(0).to(torch.int8), scales


def dequantize_rows(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """codes int8 [..., D], scales float32 [..., 1] -> [..., D] in `dtype`."""
    return codes.to(dtype).mul_(scales.to(dtype))


def new_cache(shape: tuple[int, int, int, int], dtype: torch.dtype) -> KVTensor:
    """shape [KV, num_blocks, block_size, D]. Zeroed, so that padding read beside real tokens is finite."""
    if dtype == torch.int8:
        return Int8Cache(torch.zeros(shape, dtype=dtype), torch.zeros(shape[:3]))
    return torch.zeros(shape, dtype=dtype)


def row_bytes(head_dim: int, dtype: torch.dtype) -> int:
    """Of the keys, or of the values, of one token and KV head."""
    return head_dim * dtype.itemsize + (SCALE_BYTES if dtype == torch.int8 else 0)
