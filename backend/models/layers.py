"""Pieces that the families share, on whole-step tensors `[num_tokens, ...]`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from backend.cpu.linear import Linear
from backend.cpu.packed import PackedWeight
from backend.models.config import ModelConfig, RopeScaling

MakeLinear = Callable[[Sequence[PackedWeight]], Linear]  # one product for matrices of equal width


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """Rotary angle per position of each pair, float32 `[head_dim / 2]`, after the config's scaling."""
    inv_freq = plain_frequencies(config.rope_theta, config.head_dim)
    if config.rope_scaling is None:
        return inv_freq
    if config.rope_scaling.kind == "llama3":
        return _llama3_bands(inv_freq, config.rope_scaling)
    if config.rope_scaling.kind == "yarn":
        return _yarn_ramp(inv_freq, config.rope_scaling, config.rope_theta)
    return inv_freq / config.rope_scaling.factor


def plain_frequencies(theta: float, head_dim: int) -> Tensor:
    half = head_dim // 2
    return theta ** -(torch.arange(half, dtype=torch.float32) / half)


def _llama3_bands(inv_freq: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1: fast pairs stay, slow ones are divided by `factor`, between them a linear blend."""
    turns = scaling.original_max_position * inv_freq / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp_(0, 1)
    return inv_freq * (keep + (1 - keep) / scaling.factor)


def _yarn_ramp(inv_freq: Tensor, scaling: RopeScaling, theta: float) -> Tensor:
    """YaRN, section 3.2: the blend runs linearly over the pairs' numbers, from `beta_fast` turns to `beta_slow`."""
    half = len(inv_freq)

    def pair_with(turns: float) -> float:
        return (
            half * math.log(scaling.original_max_position / (turns * 2 * math.pi)) / math.log(theta)
        )

    first, last = pair_with(scaling.beta_fast), pair_with(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * half - 1)
    ramp = (torch.arange(half, dtype=torch.float32) - first) / max(last - first, 1e-3)
    stretched = ramp.clamp_(0, 1)
    return inv_freq * (1 - stretched + stretched / scaling.factor)


class RotaryTable:
    """cos and sin of every position met so far; grows by doubling, for few contexts come near the model's limit.

    `factor` multiplies both: what YaRN does to the length of queries and keys.
    """

    def __init__(self, inv_freq: Tensor, dtype: torch.dtype, factor: float = 1.0) -> None:
        self._inv_freq, self._dtype, self._factor = inv_freq, dtype, factor
        self._grow(1024)

    def at(self, positions: Tensor, longest: int) -> tuple[Tensor, Tensor]:
        """positions [T], all below `longest` -> cos and signed sin, each [T, 1, head_dim]."""
        if longest > self._cos.shape[0]:
            self._grow(1 << (longest - 1).bit_length())
        return self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)

    def _grow(self, num_positions: int) -> None:
        angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), self._inv_freq)
        cos, sin = angles.cos() * self._factor, angles.sin() * self._factor
        self._cos = torch.cat((cos, cos), dim=-1).to(self._dtype)
        self._sin = torch.cat((-sin, sin), dim=-1).to(self._dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate-half rotary embedding; `sin` carries the minus of the first half.  x [T, heads, head_dim] -> the same."""
    return (x * cos).addcmul_(x.roll(x.shape[-1] // 2, -1), sin)


def rms_normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Over the last dimension."""
    return F.rms_norm(x, weight.shape, weight, eps)


def softcapped(x: Tensor, cap: float) -> Tensor:
    """Smoothly held between -cap and cap (Gemma 2)."""
    return x.div(cap).tanh_().mul_(cap)


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """The inside of a gated feed-forward: act(gate) * up."""
    if activation == "silu":
        return F.silu(gate).mul_(up)
    return F.gelu(gate, approximate="tanh").mul_(up)
