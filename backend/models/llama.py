"""The Llama family: pre-norm decoder, rotary attention with grouped queries, SiLU-gated feed-forward.

`LlamaWeights` holds what the file holds, so a tier that computes on packed blocks starts from the same object as the
portable torch model below.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from backend.cpu.activations import rounding_first
from backend.cpu.attention import attend, plan_attention, write_cache
from backend.cpu.linear import Linear, make_linear
from backend.cpu.packed import PackedWeight
from backend.models.batch import Batch, KVCache
from backend.models.checkpoint import Checkpoint, checkpoint_fingerprint
from backend.models.config import ModelConfig
from backend.models.errors import ModelLoadError
from backend.models.layers import RotaryTable, inverse_frequencies, rotate
from backend.quant.kv import new_cache, row_bytes

MakeLinear = Callable[[Sequence[PackedWeight]], Linear]


@dataclass(frozen=True, slots=True)
class LlamaLayerWeights:
    """Matrices are [out_features, in_features]; those of one tuple share their input and are fused in this order."""

    attn_norm: Tensor  # [hidden] float32
    qkv: tuple[PackedWeight, PackedWeight, PackedWeight]
    attn_out: PackedWeight
    mlp_norm: Tensor  # [hidden] float32
    gate_up: tuple[PackedWeight, PackedWeight]
    down: PackedWeight


@dataclass(frozen=True, slots=True)
class LlamaWeights:
    """q and k rows are in rotate-half order."""

    config: ModelConfig
    fingerprint: str
    embed: PackedWeight  # [vocab, hidden]
    layers: list[LlamaLayerWeights]
    norm: Tensor  # [hidden] float32
    lm_head: PackedWeight  # [vocab, hidden]; the very embed object when tied
    inv_freq: Tensor  # [head_dim / 2] float32, scaling applied


def read_llama_weights(checkpoint: Checkpoint, config: ModelConfig) -> LlamaWeights:
    """Collect and shape-check every tensor; nothing is dequantized yet but the norms."""
    read = _CheckedReader(checkpoint)
    vocab, hidden = config.vocab_size, config.hidden_size
    embed = read.matrix("model.embed_tokens.weight", vocab, hidden)
    tied = config.tie_word_embeddings or "lm_head.weight" not in set(checkpoint.names())
    inv_freq = inverse_frequencies(config)
    if "rope_freqs.weight" in set(checkpoint.names()):  # Llama 3.1 GGUFs bring their divisors along
        inv_freq /= read.vector("rope_freqs.weight", config.head_dim // 2)
    return LlamaWeights(
        config=config,
        fingerprint=checkpoint_fingerprint(checkpoint),
        embed=embed,
        layers=[_read_layer(read, config, index) for index in range(config.num_layers)],
        norm=read.vector("model.norm.weight", hidden),
        lm_head=embed if tied else read.matrix("lm_head.weight", vocab, hidden),
        inv_freq=inv_freq,
    )


def _read_layer(read: _CheckedReader, config: ModelConfig, index: int) -> LlamaLayerWeights:
    prefix, hidden, ffn = f"model.layers.{index}.", config.hidden_size, config.intermediate_size
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return LlamaLayerWeights(
        attn_norm=read.vector(prefix + "input_layernorm.weight", hidden),
        qkv=(
            read.matrix(prefix + "self_attn.q_proj.weight", q_rows, hidden),
            read.matrix(prefix + "self_attn.k_proj.weight", kv_rows, hidden),
            read.matrix(prefix + "self_attn.v_proj.weight", kv_rows, hidden),
        ),
        attn_out=read.matrix(prefix + "self_attn.o_proj.weight", hidden, q_rows),
        mlp_norm=read.vector(prefix + "post_attention_layernorm.weight", hidden),
        gate_up=(
            read.matrix(prefix + "mlp.gate_proj.weight", ffn, hidden),
            read.matrix(prefix + "mlp.up_proj.weight", ffn, hidden),
        ),
        down=read.matrix(prefix + "mlp.down_proj.weight", hidden, ffn),
    )


class _CheckedReader:
    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    def matrix(self, name: str, rows: int, cols: int) -> PackedWeight:
        weight = self._checkpoint.weight(name)
        if weight.shape != (rows, cols):
            raise ModelLoadError(
                f"{self._checkpoint.source}: tensor {name} is {list(weight.shape)}, expected {[rows, cols]}"
            )
        return weight

    def vector(self, name: str, size: int) -> Tensor:
        return self.matrix(name, 1, size).dequantize().view(size)


class _Layer:
    def __init__(self, weights: LlamaLayerWeights, dtype: torch.dtype, make: MakeLinear) -> None:
        self.attn_norm, self.mlp_norm = weights.attn_norm.to(dtype), weights.mlp_norm.to(dtype)
        self.qkv = make(weights.qkv)
        self.attn_out = make([weights.attn_out])
        self.gate_up = make(weights.gate_up)
        self.down = make([weights.down])


class Llama:
    """The portable tier: torch alone, any CPU."""

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
        formats = f"{dtype}-{activations}-{self.kv_dtype}".replace("torch.", "")
        self.fingerprint = f"{weights.fingerprint}-{formats}"
        self._embedding = weights.embed.dequantize().to(dtype)
        self._layers = [_Layer(layer, dtype, make) for layer in weights.layers]
        self._norm = weights.norm.to(dtype)
        self._lm_head = make([weights.lm_head])
        self._rotary = RotaryTable(weights.inv_freq, dtype)

    def kv_bytes_per_block(self, block_size: int) -> int:
        row = self.config.num_kv_heads * row_bytes(self.config.head_dim, self.kv_dtype)
        return 2 * self.config.num_layers * block_size * row

    def new_kv_cache(self, num_blocks: int, block_size: int) -> KVCache:
        shape = (self.config.num_kv_heads, num_blocks, block_size, self.config.head_dim)
        layers = range(self.config.num_layers)
        keys = [new_cache(shape, self.kv_dtype) for _ in layers]
        values = [new_cache(shape, self.kv_dtype) for _ in layers]
        return KVCache(keys, values, block_size)

    @torch.inference_mode()
    def forward(self, batch: Batch, kv: KVCache) -> Tensor:
        plan = plan_attention(
            batch.query_start, batch.context_lens, batch.block_tables, kv.block_size, self.dtype
        )
        cos, sin = self._rotary.at(batch.positions, max(batch.context_lens))
        x = self._embedding.index_select(0, batch.token_ids)
        for layer, keys, values in zip(self._layers, kv.keys, kv.values, strict=True):
            qkv = layer.qkv(self._normed(x, layer.attn_norm))
            query, key, value = self._split_heads(qkv, cos, sin)
            write_cache(keys, batch.slot_mapping, key)
            write_cache(values, batch.slot_mapping, value)
            x += layer.attn_out(attend(query, keys, values, plan))
            gate, up = layer.gate_up(self._normed(x, layer.mlp_norm)).chunk(2, dim=-1)
            x += layer.down(F.silu(gate).mul_(up))
        x = x.index_select(0, batch.logits_rows)
        return self._lm_head(self._normed(x, self._norm)).float()

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self.config.rms_norm_eps)

    def _split_heads(self, qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[T, (H + 2 KV) * D] -> rotated query [T, H, D] and key [T, KV, D], value [T, KV, D]."""
        heads, kv_heads = self.config.num_heads, self.config.num_kv_heads
        by_head = qkv.view(qkv.shape[0], heads + 2 * kv_heads, self.config.head_dim)
        rotated = rotate(by_head[:, : heads + kv_heads], cos, sin)
        return rotated[:, :heads], rotated[:, heads:], by_head[:, heads + kv_heads :]
