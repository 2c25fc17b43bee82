"""What a decoder's file holds, collected and shape-checked; nothing is dequantized yet but norms and biases.

A tier that computes on packed blocks starts from the same object as the portable torch model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from backend.cpu.packed import PackedWeight
from backend.models.checkpoint import Checkpoint, checkpoint_fingerprint
from backend.models.config import ModelConfig
from backend.models.errors import ModelLoadError
from backend.models.experts import ExpertWeights, GatedWeights
from backend.models.layers import inverse_frequencies, plain_frequencies


@dataclass(frozen=True, slots=True)
class LlamaLayerWeights:
    """Matrices are [out_features, in_features]; those of one tuple share their input and are fused in this order."""

    attn_norm: Tensor  # [hidden] float32
    qkv: tuple[PackedWeight, ...]  # q alone where keys and values come from an earlier layer
    attn_out: PackedWeight
    mlp_norm: Tensor  # [hidden] float32
    gate_up: tuple[PackedWeight, ...]  # () with experts
    down: PackedWeight | None  # None with experts
    qkv_bias: Tensor | None = None  # [rows of qkv] float32
    attn_out_bias: Tensor | None = None  # [hidden] float32
    q_norm: Tensor | None = None  # [head_dim] float32
    k_norm: Tensor | None = None
    attn_post_norm: Tensor | None = None  # [hidden] float32
    mlp_post_norm: Tensor | None = None
    experts: ExpertWeights | None = None


@dataclass(frozen=True, slots=True)
class LlamaWeights:
    """q and k rows are in rotate-half order; norms are what the normed value is multiplied by."""

    config: ModelConfig
    fingerprint: str
    embed: PackedWeight  # [vocab, hidden]
    layers: list[LlamaLayerWeights]
    norm: Tensor  # [hidden] float32
    lm_head: PackedWeight  # [vocab, hidden]; the very embed object when tied
    inv_freq: Tensor  # [head_dim / 2] float32, scaling applied
    local_inv_freq: Tensor | None = None  # of layers with a window, where they have their own


def read_llama_weights(checkpoint: Checkpoint, config: ModelConfig) -> LlamaWeights:
    """Raises ModelLoadError naming the tensor that is missing or of another shape."""
    read = _CheckedReader(checkpoint)
    names = set(checkpoint.names())
    vocab, hidden = config.vocab_size, config.hidden_size
    embed = read.matrix("model.embed_tokens.weight", vocab, hidden)
    tied = config.tie_word_embeddings or "lm_head.weight" not in names
    inv_freq = inverse_frequencies(config)
    if "rope_freqs.weight" in names:  # Llama 3.1 GGUFs bring their divisors along
        inv_freq /= read.vector("rope_freqs.weight", config.head_dim // 2)
    local = config.local_rope_theta
    return LlamaWeights(
        config=config,
        fingerprint=checkpoint_fingerprint(checkpoint),
        embed=embed,
        layers=[_LayerReader(read, config, i).layer() for i in range(config.num_layers)],
        norm=read.vector("model.norm.weight", hidden),
        lm_head=embed if tied else read.matrix("lm_head.weight", vocab, hidden),
        inv_freq=inv_freq,
        local_inv_freq=None if local is None else plain_frequencies(local, config.head_dim),
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


class _LayerReader:
    def __init__(self, read: _CheckedReader, config: ModelConfig, index: int) -> None:
        self._read, self._config, self._index = read, config, index
        self._hidden = config.hidden_size
        self._q_rows = config.num_heads * config.head_dim
        self._kv_rows = config.num_kv_heads * config.head_dim
        self._own_cache = config.kv_source(index) == index

    def layer(self) -> LlamaLayerWeights:
        c = self._config
        before_mlp = "pre_feedforward_layernorm" if c.sandwich_norms else "post_attention_layernorm"
        attn_norm = self._norm("input_layernorm")
        experts = self._experts() if c.has_experts(self._index) else None
        dense = None if experts else self._gated("mlp.", c.intermediate_size)
        return LlamaLayerWeights(
            attn_norm=attn_norm,
            qkv=self._qkv(),
            attn_out=self._matrix("self_attn.o_proj", self._hidden, self._q_rows),
            mlp_norm=self._norm(before_mlp),
            gate_up=dense.gate_up if dense else (),
            down=dense.down if dense else None,
            qkv_bias=self._qkv_bias() if c.attention_bias else None,
            attn_out_bias=self._vector("self_attn.o_proj.bias", self._hidden)
            if c.attention_out_bias
            else None,
            q_norm=self._head_norm("self_attn.q_norm") if c.qk_norm else None,
            k_norm=self._head_norm("self_attn.k_norm") if c.qk_norm and self._own_cache else None,
            attn_post_norm=self._norm("post_attention_layernorm") if c.sandwich_norms else None,
            mlp_post_norm=self._norm("post_feedforward_layernorm") if c.sandwich_norms else None,
            experts=experts,
        )

    def _qkv(self) -> tuple[PackedWeight, ...]:
        return tuple(self._matrix(name, rows, self._hidden) for name, rows in self._projections())

    def _qkv_bias(self) -> Tensor:
        return torch.cat([self._vector(f"{name}.bias", rows) for name, rows in self._projections()])

    def _projections(self) -> list[tuple[str, int]]:
        both = [("self_attn.k_proj", self._kv_rows), ("self_attn.v_proj", self._kv_rows)]
        return [("self_attn.q_proj", self._q_rows), *(both if self._own_cache else [])]

    def _experts(self) -> ExpertWeights:
        experts = self._config.experts
        assert experts is not None
        shared = experts.shared_size
        return ExpertWeights(
            router=self._matrix("mlp.gate", experts.num_experts, self._hidden),
            experts=[
                self._gated(f"mlp.experts.{i}.", experts.intermediate_size)
                for i in range(experts.num_experts)
            ],
            shared=self._gated("mlp.shared_expert.", shared) if shared else None,
            shared_gate=self._matrix("mlp.shared_expert_gate", 1, self._hidden) if shared else None,
        )

    def _gated(self, part: str, ffn: int) -> GatedWeights:
        return GatedWeights(
            gate_up=(
                self._matrix(part + "gate_proj", ffn, self._hidden),
                self._matrix(part + "up_proj", ffn, self._hidden),
            ),
            down=self._matrix(part + "down_proj", self._hidden, ffn),
        )

    def _matrix(self, name: str, rows: int, cols: int) -> PackedWeight:
        return self._read.matrix(f"model.layers.{self._index}.{name}.weight", rows, cols)

    def _norm(self, name: str) -> Tensor:
        return self._vector(f"{name}.weight", self._hidden)

    def _head_norm(self, name: str) -> Tensor:
        return self._vector(f"{name}.weight", self._config.head_dim)

    def _vector(self, name: str, size: int) -> Tensor:
        return self._read.vector(f"model.layers.{self._index}.{name}", size)
