"""Gemma 2 and the text part of Gemma 3: norms around both halves of a layer, windows on most layers, scaled embedding.

Gemma 3 turns its windowed layers by another, unscaled rotary base and norms the heads of q and k; Gemma 2 caps scores
and logits instead. Safetensors hold w of the norms' 1 + w; GGUF writers have added the 1 already.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from backend.models.config import ModelConfig
from backend.models.metadata import Metadata

GGUF_LAYER_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# The published files leave out what equals the defaults of their configuration classes.
_DEFAULTS: Mapping[str, Any] = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
}
GEMMA2_DEFAULTS = {
    **_DEFAULTS,
    "vocab_size": 256000,
    "max_position_embeddings": 8192,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
GEMMA3_DEFAULTS = {
    **_DEFAULTS,
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "rope_theta": 1e6,
}
_LOCAL_THETA = 10000.0
_GEMMA2_PERIOD, _GEMMA3_PERIOD = 2, 6  # the last layer of so many sees all
# These sizes scale their scores by the width of the model and not by that of a head; GGUF does not say so.
_GEMMA2_27B_LAYERS, _GEMMA3_27B_LAYERS = 46, 62


def gemma2_from_hf(config: ModelConfig, get: Metadata) -> ModelConfig:
    return _from_hf(config, get, _GEMMA2_PERIOD)


def gemma3_from_hf(config: ModelConfig, get: Metadata) -> ModelConfig:
    if get.flag("use_bidirectional_attention"):
        raise get.refuse("use_bidirectional_attention")
    config = _from_hf(config, get, get.integer("sliding_window_pattern", _GEMMA3_PERIOD))
    local = get.part("rope_parameters").part("sliding_attention")
    theta = local.number("rope_theta", get.number("rope_local_base_freq", _LOCAL_THETA))
    if (kind := local.text("rope_type", "default")) != "default":
        raise get.refuse(f"rope scaling {kind!r} of layers with a window")
    return replace(config, qk_norm=True, local_rope_theta=theta)


def _from_hf(config: ModelConfig, get: Metadata, period: int) -> ModelConfig:
    kinds = get.listed("layer_types", str, config.num_layers)
    windowed = (
        [kind == "sliding_attention" for kind in kinds] if kinds else _by_period(config, period)
    )
    return _gemma(
        config,
        windowed,
        get.integer("sliding_window"),
        query_scale=get.number("query_pre_attn_scalar") ** -0.5,
        attention_softcap=get.optional_number("attn_logit_softcapping"),
        logit_softcap=get.optional_number("final_logit_softcapping"),
    )


def gemma2_from_gguf(config: ModelConfig, get: Metadata) -> ModelConfig:
    return _gemma(
        config,
        _by_period(config, _GEMMA2_PERIOD),
        get.integer("attention.sliding_window", 4096),
        query_scale=_gguf_query_scale(config, _GEMMA2_27B_LAYERS),
        attention_softcap=get.number("attn_logit_softcapping", 50.0),
        logit_softcap=get.number("final_logit_softcapping", 30.0),
    )


def gemma3_from_gguf(config: ModelConfig, get: Metadata) -> ModelConfig:
    config = replace(
        config,
        qk_norm=True,
        local_rope_theta=get.number("rope.freq_base_swa", _LOCAL_THETA),
        rope_theta=get.number("rope.freq_base", 1e6),
    )
    return _gemma(
        config,
        _gguf_windowed(config, get),
        get.integer("attention.sliding_window"),
        query_scale=_gguf_query_scale(config, _GEMMA3_27B_LAYERS),
        logit_softcap=get.optional_number("final_logit_softcapping"),
    )


def _gguf_windowed(config: ModelConfig, get: Metadata) -> list[bool]:
    """A period, or one flag a layer; older files leave it to the reader."""
    key = "attention.sliding_window_pattern"
    if isinstance(get.values.get(key), list):
        return get.listed(key, bool, config.num_layers) or []
    return _by_period(config, get.integer(key, _GEMMA3_PERIOD))


def _gguf_query_scale(config: ModelConfig, wide_scaled_layers: int) -> float:
    if config.num_layers == wide_scaled_layers:
        return (config.hidden_size / config.num_heads) ** -0.5
    return config.head_dim**-0.5


def _by_period(config: ModelConfig, period: int) -> list[bool]:
    return [(layer + 1) % max(1, period) > 0 for layer in range(config.num_layers)]


def _gemma(config: ModelConfig, windowed: list[bool], window: int, **caps: Any) -> ModelConfig:
    return replace(
        config,
        windows=tuple(window if each else None for each in windowed),
        embedding_scale=math.sqrt(config.hidden_size),
        activation="gelu_tanh",
        sandwich_norms=True,
        **caps,
    )
