"""Activations as signed bytes, 32 columns to a scale: what the native tier multiplies in integers, in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from backend.cpu.packed import PackedWeight, in_one_kind

GROUP = 32  # columns that share a scale
# Weights in such blocks meet bytes, others floats.
ROUNDED_FOR = frozenset(("Q8_0", "Q4_0", "Q4_1", "W4"))
_TINY = 1e-30  # a group whose values all lie below becomes 0


def rounded_to_bytes(x: Tensor) -> Tensor:
    """float32 x [T, cols] -> the nearest values that bytes can hold: q * scale, scale = max |x| / 127 in each group.

    A row's result depends on nothing but that row. A group with a value that is not finite becomes NaN.
    """
    groups = x.unflatten(-1, (-1, GROUP))
    peak = groups.abs().amax(-1, keepdim=True)
    inverse = torch.where(peak > _TINY, 127 / peak, 0)
    scale = torch.where(peak.isfinite(), peak / 127, torch.nan)
    return ((groups * inverse).round_() * scale).flatten(-2)


def rounding_first(
    linear: Callable[[Tensor], Tensor], weights: Sequence[PackedWeight]
) -> Callable[[Tensor], Tensor]:
    """`linear` on rounded inputs, where the native tier would round them for these stacked `weights`."""
    if in_one_kind(weights)[0].kind not in ROUNDED_FOR:
        return linear
    return lambda x: linear(rounded_to_bytes(x))
