"""Rotary position embedding, which the families share, on whole-step tensors `[num_tokens, ...]`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from backend.models.config import ModelConfig, RopeScaling


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """Rotary angle per position of each pair, float32 `[head_dim / 2]`, after the config's scaling."""
    half = config.head_dim // 2
    inv_freq = config.rope_theta ** -(torch.arange(half, dtype=torch.float32) / half)
    if config.rope_scaling is None:
        return inv_freq
    if config.rope_scaling.kind == "llama3":
        return _llama3_bands(inv_freq, config.rope_scaling)
    return inv_freq / config.rope_scaling.factor


def _llama3_bands(inv_freq: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1: fast pairs stay, slow ones are divided by `factor`, between them a linear blend."""
    turns = scaling.original_max_position * inv_freq / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp_(0, 1)
    return inv_freq * (keep + (1 - keep) / scaling.factor)


class RotaryTable:
    """cos and sin of every position met so far; grows by doubling, for few contexts come near the model's limit."""

    def __init__(self, inv_freq: Tensor, dtype: torch.dtype) -> None:
        self._inv_freq, self._dtype = inv_freq, dtype
        self._grow(1024)

    def at(self, positions: Tensor, longest: int) -> tuple[Tensor, Tensor]:
        """positions [T], all below `longest` -> cos and signed sin, each [T, 1, head_dim]."""
        if longest > self._cos.shape[0]:
            self._grow(1 << (longest - 1).bit_length())
        return self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)

    def _grow(self, num_positions: int) -> None:
        angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), self._inv_freq)
        self._cos = torch.cat((angles.cos(), angles.cos()), dim=-1).to(self._dtype)
        self._sin = torch.cat((-angles.sin(), angles.sin()), dim=-1).to(self._dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate-half rotary embedding; `sin` carries the minus of the first half.  x [T, heads, head_dim] -> the same."""
    return (x * cos).addcmul_(x.roll(x.shape[-1] // 2, -1), sin)
