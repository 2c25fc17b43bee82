"""Quantizes small matrices as GPTQ and AWQ writers do, and says what each then means in float32."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.backend import tiny_llama

AWQ_FIELDS = (
    0,
    2,
    4,
    6,
    1,
    3,
    5,
    7,
)  # which output lies in each field of a word, lowest bits first


@dataclass(frozen=True)
class Grid:
    """code = round(w / scale) + zero, cut to the bits; [in, out] codes, [groups, out] scales and zeros."""

    codes: Tensor  # int64
    scales: Tensor  # float16
    zeros: Tensor  # int64
    group_of: Tensor  # [in]

    def dense(self) -> Tensor:
        """float32 [out, in]"""
        steps = (self.codes - self.zeros[self.group_of]).float()
        return (steps * self.scales.float()[self.group_of]).T.contiguous()


def grid(
    weight: Tensor,
    *,
    bits: int = 4,
    group_size: int = 32,
    sym: bool = False,
    order: Tensor | None = None,
) -> Grid:
    """weight [out, in]; order: inputs in the order in which they fill the groups (GPTQ's desc_act)."""
    num_in, top = weight.shape[1], (1 << bits) - 1
    group_size = num_in if group_size == -1 else group_size
    group_of = torch.empty(num_in, dtype=torch.long)
    group_of[torch.arange(num_in) if order is None else order] = torch.arange(num_in) // group_size
    groups = [weight.T[group_of == g] for g in range(num_in // group_size)]
    low = torch.stack([part.amin(0).clamp_max(0) for part in groups])
    high = torch.stack([part.amax(0).clamp_min(0) for part in groups])
    if sym:
        high = torch.maximum(high, -low)
        low = -high
    scales = ((high - low) / top).half()
    zeros = torch.round(-low / scales.float()).clamp_(0, top).long()
    if sym:
        zeros.fill_((top + 1) // 2)
    codes = torch.round(weight.T / scales.float()[group_of]).long() + zeros[group_of]
    return Grid(codes.clamp_(0, top), scales, zeros, group_of)


def gptq_parts(
    g: Grid, *, bits: int = 4, v2: bool = False, desc_act: bool = False
) -> dict[str, Tensor]:
    words = pack_words(g.zeros, bits)
    if not v2:
        words = words - sum(1 << shift for shift in range(0, 32, bits))
    parts = {
        "qweight": as_int32(pack_words(g.codes.T, bits).T),
        "qzeros": as_int32(words),
        "scales": g.scales,
    }
    return parts | ({"g_idx": g.group_of.int()} if desc_act else {})


def awq_parts(g: Grid) -> dict[str, Tensor]:
    def words(values: Tensor) -> Tensor:
        fields = values.view(len(values), -1, 8)[..., list(AWQ_FIELDS)]
        return as_int32(pack_words(fields.reshape(values.shape), 4))

    return {"qweight": words(g.codes), "qzeros": words(g.zeros), "scales": g.scales}


def pack_words(values: Tensor, bits: int) -> Tensor:
    """int64 [n, m] -> [n, m * bits / 32], the first value in the lowest bits."""
    fields = values.reshape(len(values), -1, 32 // bits)
    return (fields << torch.arange(0, 32, bits)).sum(-1)


def as_int32(words: Tensor) -> Tensor:
    words = words & 0xFFFFFFFF
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int().contiguous()


def write_quantized(
    folder: Path, settings: dict[str, Any], **options: Any
) -> tuple[Path, dict[str, Tensor]]:
    """A tiny Llama whose projections are quantized as `settings` say, and its weights as they then are."""
    weights, stored = tiny_llama.tensors(), {}
    for name, weight in weights.items():
        if not name.endswith("_proj.weight"):
            stored[name] = weight.half()
            weights[name] = weight.half().float()
            continue
        made = grid(weight, **options)
        if settings["quant_method"] == "awq":
            parts = awq_parts(made)
        else:
            parts = gptq_parts(
                made,
                bits=settings["bits"],
                v2=settings.get("checkpoint_format") == "gptq_v2",
                desc_act=settings.get("desc_act", False),
            )
        stored |= {f"{name.removesuffix('weight')}{part}": t for part, t in parts.items()}
        weights[name] = made.dense()
    return tiny_llama.write_folder(folder, stored, quantization_config=settings), weights
