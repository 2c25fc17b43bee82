"""Groups of integer codes, the one form behind every weight format: w[r, c] = scale[r, g] * codes[r, c] + offset[r, g].

g = c // group_size. A zero point is an offset: scale * (code - zero) has the offset -scale * zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class AffineWeight:
    """A quantized matrix `[rows, cols]`; equal columns a group."""

    codes: Tensor  # int8 [rows, cols]
    scale: Tensor  # float32 [rows, cols / group_size]
    offset: Tensor  # float32 [rows, cols / group_size]

    @property
    def group_size(self) -> int:
        return self.codes.shape[1] // self.scale.shape[1]

    @property
    def is_four_bit(self) -> bool:
        return bool((self.codes.amin() >= 0) & (self.codes.amax() <= 15))

    def dequantize(self) -> Tensor:
        """float32 [rows, cols]."""
        grouped = self.codes.reshape(*self.scale.shape, self.group_size).float()
        return (grouped * self.scale[..., None] + self.offset[..., None]).view(self.codes.shape)

    def regrouped(self, group_size: int) -> AffineWeight:
        """The same weight in smaller groups, `group_size` a divisor of the present one."""
        times = self.group_size // group_size
        scale, offset = (part.repeat_interleave(times, 1) for part in (self.scale, self.offset))
        return AffineWeight(self.codes, scale, offset)


def stacked(weights: Sequence[AffineWeight]) -> AffineWeight:
    """Matrices of equal width, one under the other, in the smallest of their groups."""
    group_size = min(weight.group_size for weight in weights)
    alike = [weight.regrouped(group_size) for weight in weights]
    return AffineWeight(
        torch.cat([weight.codes for weight in alike]),
        torch.cat([weight.scale for weight in alike]),
        torch.cat([weight.offset for weight in alike]),
    )


def half_where_possible(values: Tensor) -> Tensor:
    """Rounded to what float16 holds, unless that costs a value more than 11 bits of it or of the mean.

    So values far below the others may be coarse, but overflow and a matrix that is tiny as a whole are kept in float32.
    Formats with float16 scales then hold the result exactly; codes must be computed after this rounding.
    """
    rounded, sizes = values.half().float(), values.abs()
    fits = (rounded - values).abs() <= sizes.clamp_min(sizes.mean().item()) * 2.0**-11
    return rounded if fits.all() else values
