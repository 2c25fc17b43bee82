"""Llama and the families that grew from it, on the portable tier: torch alone, any CPU.

A pre-norm decoder with rotary attention and a gated feed-forward; what a family adds (biases, head norms, windows,
caps, experts, norms behind each half) is there where its config and weights have it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from backend.cpu.activations import rounding_first
from backend.cpu.attention import AttentionPlan, plan_attention
from backend.cpu.linear import Linear, make_linear
from backend.cpu.packed import PackedWeight
from backend.models.attention import Attention, AttentionStep, Rotation
from backend.models.batch import Batch, KVCache
from backend.models.config import ModelConfig
from backend.models.experts import Experts, GatedFeedForward, GatedWeights
from backend.models.layers import MakeLinear, RotaryTable, rms_normed, softcapped
from backend.models.llama_weights import LlamaLayerWeights, LlamaWeights, read_llama_weights
from backend.quant.kv import new_cache, row_bytes

__all__ = ["Llama", "LlamaLayerWeights", "LlamaWeights", "read_llama_weights"]


class Llama:
    """Implements `backend.models.batch.Model`."""

    is_batch_invariant = False  # matrix products of other sizes sum in another order

    def __init__(
        self,
        weights: LlamaWeights,
        dtype: torch.dtype,
        activations: str = "float32",
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        """`activations`: "int8" gives what the native tier gives then, with dtype float32; it saves no time here.

        `kv_dtype`: of the KV cache; None: that of the arithmetic.
        """
        config = weights.config

        def make(stack: Sequence[PackedWeight]) -> Linear:
            linear = make_linear(stack, dtype)
            return rounding_first(linear, stack) if activations == "int8" else linear

        self.config, self.dtype, self.kv_dtype = config, dtype, kv_dtype or dtype
        self.vocab_size, self.max_position = config.vocab_size, config.max_position
        self.window = config.window
        self.hidden_size = config.hidden_size
        formats = f"{dtype}-{activations}-{self.kv_dtype}".replace("torch.", "")
        self.fingerprint = f"{weights.fingerprint}-{formats}"
        self._embedding = weights.embed.dequantize().mul_(config.embedding_scale).to(dtype)
        self._layers = [
            _Layer(layer, config, index, dtype, make) for index, layer in enumerate(weights.layers)
        ]
        self._norm = weights.norm.to(dtype)
        self._lm_head = make([weights.lm_head])
        self._windows = {config.window_of(layer) for layer in range(config.num_layers)}
        self._rotary = _rotary_tables(weights, dtype)

    def kv_bytes_per_block(self, block_size: int) -> int:
        row = self.config.num_kv_heads * row_bytes(self.config.head_dim, self.kv_dtype)
        return 2 * len(self.config.cache_layers) * block_size * row

    def new_kv_cache(self, num_blocks: int, block_size: int) -> KVCache:
        shape = (self.config.num_kv_heads, num_blocks, block_size, self.config.head_dim)
        layers = self.config.cache_layers
        keys = [new_cache(shape, self.kv_dtype) for _ in layers]
        values = [new_cache(shape, self.kv_dtype) for _ in layers]
        return KVCache(keys, values, block_size)

    def forward(self, batch: Batch, kv: KVCache) -> Tensor:
        return self.logits(self.hidden_states(batch, kv))

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        logits = self._lm_head(hidden.to(self.dtype)).float()
        cap = self.config.logit_softcap
        return logits if cap is None else softcapped(logits, cap)

    @torch.inference_mode()
    def hidden_states(self, batch: Batch, kv: KVCache) -> Tensor:
        step = AttentionStep(batch.slot_mapping, kv, self._plans(batch, kv), self._rotations(batch))
        x = self._embedding.index_select(0, batch.token_ids)
        for layer in self._layers:
            x = layer(x, step)
        x = x.index_select(0, batch.logits_rows)
        return rms_normed(x, self._norm, self.config.rms_norm_eps).float()

    def _plans(self, batch: Batch, kv: KVCache) -> dict[int | None, AttentionPlan]:
        """One for all windows that no context of this step outgrows."""
        longest = max(batch.context_lens)
        plans: dict[int | None, AttentionPlan] = {}
        for window in self._windows:
            needed = None if window is None or longest <= window else window
            if needed not in plans:
                plans[needed] = plan_attention(
                    batch.query_start,
                    batch.context_lens,
                    batch.block_tables,
                    kv.block_size,
                    self.dtype,
                    window=needed,
                )
            plans[window] = plans[needed]
        return plans

    def _rotations(self, batch: Batch) -> dict[bool, Rotation]:
        longest = max(batch.context_lens)
        tables = {id(table): table for table in self._rotary.values()}
        turned = {key: table.at(batch.positions, longest) for key, table in tables.items()}
        return {local: turned[id(table)] for local, table in self._rotary.items()}


def _rotary_tables(weights: LlamaWeights, dtype: torch.dtype) -> dict[bool, RotaryTable]:
    """By whether a layer is local; one table where all turn alike."""
    scaling, local = weights.config.rope_scaling, weights.local_inv_freq
    everywhere = RotaryTable(weights.inv_freq, dtype, scaling.attention_factor if scaling else 1.0)
    return {False: everywhere, True: everywhere if local is None else RotaryTable(local, dtype)}


class _Layer:
    def __init__(
        self,
        weights: LlamaLayerWeights,
        config: ModelConfig,
        index: int,
        dtype: torch.dtype,
        make: MakeLinear,
    ) -> None:
        def norm(weight: Tensor | None) -> Tensor | None:
            return None if weight is None else weight.to(dtype)

        self._eps = config.rms_norm_eps
        self._attention = Attention(weights, config, index, dtype, make)
        self._feed_forward = _feed_forward(weights, config, dtype, make)
        self._attn_norm, self._mlp_norm = weights.attn_norm.to(dtype), weights.mlp_norm.to(dtype)
        self._attn_post_norm, self._mlp_post_norm = (
            norm(weights.attn_post_norm),
            norm(weights.mlp_post_norm),
        )

    def __call__(self, x: Tensor, step: AttentionStep) -> Tensor:
        """x [T, hidden] -> the same, in place."""
        attended = self._attention(rms_normed(x, self._attn_norm, self._eps), step)
        x += self._before_adding(attended, self._attn_post_norm)
        fed = self._feed_forward(rms_normed(x, self._mlp_norm, self._eps))
        x += self._before_adding(fed, self._mlp_post_norm)
        return x

    def _before_adding(self, x: Tensor, norm: Tensor | None) -> Tensor:
        return x if norm is None else rms_normed(x, norm, self._eps)


def _feed_forward(
    weights: LlamaLayerWeights, config: ModelConfig, dtype: torch.dtype, make: MakeLinear
) -> Linear:
    if weights.experts is not None and config.experts is not None:
        return Experts(weights.experts, config.experts, config.activation, dtype, make)
    assert weights.down is not None
    gate, up = weights.gate_up
    dense = GatedWeights((gate, up), weights.down)
    return GatedFeedForward(dense, config.activation, make)
