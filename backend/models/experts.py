"""A feed-forward of experts: rows are sorted by the experts they take, and each expert in use is one product.

Routing as in Mixtral (https://arxiv.org/abs/2401.04088) and Qwen-MoE: softmax over all experts, the best few,
their weights renormalized or not; Qwen 2 adds an expert that every row takes, behind a gate of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from backend.cpu.packed import PackedWeight
from backend.models.config import ExpertConfig
from backend.models.layers import MakeLinear, gated


@dataclass(frozen=True, slots=True)
class GatedWeights:
    gate_up: tuple[PackedWeight, PackedWeight]  # [ffn, hidden] each
    down: PackedWeight  # [hidden, ffn]


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    router: PackedWeight  # [num_experts, hidden]
    experts: list[GatedWeights]
    shared: GatedWeights | None = None
    shared_gate: PackedWeight | None = None  # [1, hidden]


class GatedFeedForward:
    def __init__(self, weights: GatedWeights, activation: str, make: MakeLinear) -> None:
        self._gate_up, self._down = make(weights.gate_up), make([weights.down])
        self._activation = activation

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self._gate_up(x).chunk(2, dim=-1)
        return self._down(gated(gate, up, self._activation))


class Experts:
    def __init__(
        self,
        weights: ExpertWeights,
        config: ExpertConfig,
        activation: str,
        dtype: torch.dtype,
        make: MakeLinear,
    ) -> None:
        self._config = config
        # In float32 whatever the model's: two experts of nearly equal score must not change places by rounding.
        self._router = weights.router.dequantize()
        self._experts = [GatedFeedForward(part, activation, make) for part in weights.experts]
        self._shared = self._shared_gate = None
        if weights.shared is not None and weights.shared_gate is not None:
            self._shared = GatedFeedForward(weights.shared, activation, make)
            self._shared_gate = weights.shared_gate.dequantize().to(dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, hidden] -> the same."""
        weights, chosen = self._routed(x)
        out = torch.zeros_like(x)
        by_expert = chosen.view(-1).argsort(stable=True)
        counts = torch.bincount(chosen.view(-1), minlength=len(self._experts)).tolist()
        start = 0
        for expert, count in zip(self._experts, counts, strict=True):
            if count:
                slots = by_expert[start : start + count]
                rows = slots.div(self._config.per_token, rounding_mode="floor")
                share = weights.view(-1, 1).index_select(0, slots)
                out.index_add_(0, rows, expert(x.index_select(0, rows)).mul_(share))
                start += count
        if self._shared is not None and self._shared_gate is not None:
            out += self._shared(x).mul_(F.linear(x, self._shared_gate).sigmoid_())
        return out

    def _routed(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """-> weights in the dtype of x and expert numbers, each [T, per_token]."""
        scores = F.linear(x.float(), self._router).softmax(dim=-1)
        weights, chosen = scores.topk(self._config.per_token, dim=-1)
        if self._config.renormalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights.to(x.dtype), chosen
