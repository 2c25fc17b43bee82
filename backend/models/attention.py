"""The attention half of a layer on the portable tier: products, norms and rotation of heads, cache, scores."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from backend.cpu.attention import AttentionPlan, Scoring, attend, write_cache
from backend.models.batch import KVCache
from backend.models.config import ModelConfig
from backend.models.layers import MakeLinear, rotate
from backend.models.llama_weights import LlamaLayerWeights

Rotation = tuple[Tensor, Tensor]  # cos and signed sin, each [T, 1, head_dim]


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """What one step's layers share."""

    slots: Tensor  # [T] int64
    kv: KVCache
    plans: dict[int | None, AttentionPlan]  # by the window of a layer
    rotations: dict[bool, Rotation]  # by whether a layer is local


class Attention:
    """Grouped-query attention of layer `index`; its sizes, windows and caps are the config's."""

    def __init__(
        self,
        weights: LlamaLayerWeights,
        config: ModelConfig,
        index: int,
        dtype: torch.dtype,
        make: MakeLinear,
    ) -> None:
        self._config = config
        self._window, self._local = config.window_of(index), config.is_local(index)
        source = config.kv_source(index)
        self._cache_index, self._own_cache = config.cache_layers.index(source), source == index
        self._scoring = Scoring(config.query_scale, config.attention_softcap)
        self._qkv, self._out = make(weights.qkv), make([weights.attn_out])
        self._qkv_bias = None if weights.qkv_bias is None else weights.qkv_bias.to(dtype)
        out_bias = weights.attn_out_bias
        self._out_bias = None if out_bias is None else out_bias.to(dtype)
        self._head_norms = _head_norms(weights, config)
        if self._head_norms is not None:
            self._head_norms = self._head_norms.to(dtype)

    def __call__(self, x: Tensor, step: AttentionStep) -> Tensor:
        """x [T, hidden] -> the same."""
        cos, sin = step.rotations[self._local]
        query, key, value = self._split_heads(self._products(x), cos, sin)
        keys, values = step.kv.keys[self._cache_index], step.kv.values[self._cache_index]
        if self._own_cache:
            write_cache(keys, step.slots, key)
            write_cache(values, step.slots, value)
        out = self._out(attend(query, keys, values, step.plans[self._window], self._scoring))
        return out if self._out_bias is None else out.add_(self._out_bias)

    def _products(self, x: Tensor) -> Tensor:
        qkv = self._qkv(x)
        return qkv if self._qkv_bias is None else qkv.add_(self._qkv_bias)

    def _split_heads(self, qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[T, (H + 2 KV) * D] -> rotated query [T, H, D] and key [T, KV, D], value [T, KV, D].

        Where another layer owns the cache there are the H heads of the query only, and no key and value.
        """
        heads = self._config.num_heads
        turned = heads + self._config.num_kv_heads if self._own_cache else heads
        by_head = qkv.view(qkv.shape[0], -1, self._config.head_dim)
        rotated = by_head[:, :turned]
        if self._head_norms is not None:
            rotated = F.rms_norm(rotated, rotated.shape[-1:], eps=self._config.rms_norm_eps)
            rotated = rotated * self._head_norms
        rotated = rotate(rotated, cos, sin)
        return rotated[:, :heads], rotated[:, heads:], by_head[:, turned:]


def _head_norms(weights: LlamaLayerWeights, config: ModelConfig) -> Tensor | None:
    """[heads of q and k, head_dim], so that one product serves both; None: heads are not normed."""
    if weights.q_norm is None:
        return None
    norms = weights.q_norm.expand(config.num_heads, -1)
    if weights.k_norm is None:
        return norms
    return torch.cat((norms, weights.k_norm.expand(config.num_kv_heads, -1)))
