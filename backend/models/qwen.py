"""Qwen 2, 2.5 and 3, dense and with experts: biases on q, k and v (2), or norms on the heads of q and k (3)."""

from __future__ import annotations

from dataclasses import replace

from backend.models.config import ExpertConfig, ModelConfig
from backend.models.metadata import Metadata

_SLIDING = "sliding_attention"


def qwen2_from_hf(config: ModelConfig, get: Metadata) -> ModelConfig:
    config = replace(config, attention_bias=True, attention_out_bias=False)
    return replace(config, windows=_dense_windows(config, get))


def qwen3_from_hf(config: ModelConfig, get: Metadata) -> ModelConfig:
    return replace(config, qk_norm=True, windows=_dense_windows(config, get))


def qwen2_moe_from_hf(config: ModelConfig, get: Metadata) -> ModelConfig:
    first = get.integer("max_window_layers", config.num_layers)
    sliding = [(i + 1) % 2 == 1 and i < first for i in range(config.num_layers)]
    return replace(
        config,
        attention_bias=get.flag("qkv_bias", True),
        attention_out_bias=False,
        windows=_windows(config, get, sliding),
        experts=_experts_from_hf(config, get, get.integer("shared_expert_intermediate_size")),
    )


def qwen3_moe_from_hf(config: ModelConfig, get: Metadata) -> ModelConfig:
    return replace(
        config,
        qk_norm=True,
        windows=_windows(config, get, [True] * config.num_layers),
        experts=_experts_from_hf(config, get, 0),
    )


def _dense_windows(config: ModelConfig, get: Metadata) -> tuple[int | None, ...]:
    first = get.integer("max_window_layers", config.num_layers)
    return _windows(config, get, [i >= first for i in range(config.num_layers)])


def _windows(
    config: ModelConfig, get: Metadata, sliding_by_rule: list[bool]
) -> tuple[int | None, ...]:
    if not get.flag("use_sliding_window") or not get.integer("sliding_window", 0):
        return ()
    kinds = get.listed("layer_types", str, config.num_layers)
    sliding = [kind == _SLIDING for kind in kinds] if kinds is not None else sliding_by_rule
    return tuple(get.integer("sliding_window") if slides else None for slides in sliding)


def _experts_from_hf(config: ModelConfig, get: Metadata, shared_size: int) -> ExpertConfig:
    step, plain = get.integer("decoder_sparse_step", 1), get.listed("mlp_only_layers", int) or []
    return ExpertConfig(
        num_experts=get.integer("num_experts", get.integer("num_local_experts", 0)),
        per_token=get.integer("num_experts_per_tok"),
        intermediate_size=get.integer("moe_intermediate_size"),
        renormalize=get.flag("norm_topk_prob"),
        shared_size=shared_size,
        dense_layers=tuple(
            i for i in range(config.num_layers) if i in plain or (i + 1) % max(1, step)
        ),
    )


def qwen2_from_gguf(config: ModelConfig, get: Metadata) -> ModelConfig:
    return replace(config, attention_bias=True)


def qwen3_from_gguf(config: ModelConfig, get: Metadata) -> ModelConfig:
    return replace(config, qk_norm=True)


def qwen2_moe_from_gguf(config: ModelConfig, get: Metadata) -> ModelConfig:
    shared = get.integer("expert_shared_feed_forward_length", config.intermediate_size)
    return replace(
        config, attention_bias=True, experts=_experts_from_gguf(config, get, shared, False)
    )


def qwen3_moe_from_gguf(config: ModelConfig, get: Metadata) -> ModelConfig:
    return replace(config, qk_norm=True, experts=_experts_from_gguf(config, get, 0, True))


def _experts_from_gguf(
    config: ModelConfig, get: Metadata, shared_size: int, renormalize: bool
) -> ExpertConfig:
    return ExpertConfig(
        num_experts=get.integer("expert_count"),
        per_token=get.integer("expert_used_count"),
        intermediate_size=get.integer("expert_feed_forward_length", config.intermediate_size),
        renormalize=get.flag("expert_weights_norm", renormalize),
        shared_size=shared_size,
    )
