"""The shape of a model from a transformers `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from backend.models.config import ModelConfig, RopeScaling, yarn_attention_factor
from backend.models.errors import ModelLoadError
from backend.models.families import FAMILIES, Family, hf_family
from backend.models.metadata import Metadata

_ACTIVATIONS = {
    "silu": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}


def config_from_hf(document: Mapping[str, Any], source: str) -> ModelConfig:
    """Raises ModelLoadError, in one line with the key, for what is missing, mistyped or not supported."""
    family = _family(document, source)
    text = document.get("text_config")  # the language part of a model that also sees or hears
    values = {**family.hf_defaults, **(text if isinstance(text, Mapping) else document)}
    get = Metadata(values, source)
    _refuse_what_is_not_built(get)
    config = family.from_hf(_plain_config(family, get), get)
    return _with_shared_caches(config, get).check(source)


def _family(document: Mapping[str, Any], source: str) -> Family:
    names = document.get("architectures") or []
    family = hf_family(str(names[0])) if isinstance(names, list) and names else None
    if family is None:
        supported = ", ".join(sorted(name for family in FAMILIES for name in family.hf_names))
        raise ModelLoadError(
            f"{source}: architectures {names!r} not supported; supported: {supported}"
        )
    return family


def _refuse_what_is_not_built(get: Metadata) -> None:
    if get.flag("mlp_bias"):
        raise get.refuse("mlp_bias")
    if get.number("partial_rotary_factor", 1.0) != 1:
        raise get.refuse("partial_rotary_factor (rotary embedding of a part of each head)")


def _plain_config(family: Family, get: Metadata) -> ModelConfig:
    hidden, heads = get.integer("hidden_size"), get.integer("num_attention_heads")
    rope = _rope(get)
    scaling = _rope_scaling(rope)
    max_position = get.integer("max_position_embeddings")
    if scaling is not None and scaling.kind == "yarn":
        max_position = max(max_position, int(scaling.original_max_position * scaling.factor))
    biased = get.flag("attention_bias")
    return ModelConfig(
        family=family.name,
        vocab_size=get.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=get.integer("intermediate_size"),
        num_layers=get.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=get.integer("num_key_value_heads", heads),
        head_dim=get.integer("head_dim", hidden // max(1, heads)),
        max_position=max_position,
        rms_norm_eps=get.number("rms_norm_eps"),
        rope_theta=rope.number("rope_theta", get.number("rope_theta", 10000.0)),
        rope_scaling=scaling,
        tie_word_embeddings=get.flag("tie_word_embeddings"),
        attention_bias=biased,
        attention_out_bias=biased,
        activation=_activation(get),
    )


def _activation(get: Metadata) -> str:
    key = "hidden_activation" if get.values.get("hidden_activation") else "hidden_act"
    name = get.text(key, "silu")
    if name not in _ACTIVATIONS:
        supported = ", ".join(_ACTIVATIONS)
        raise ModelLoadError(
            f"{get.source}: {key} {name!r} is not supported; supported: {supported}"
        )
    return _ACTIVATIONS[name]


def _rope(get: Metadata) -> Metadata:
    """Of the layers that see all: newer files keep the settings by kind of layer."""
    rope = get.part("rope_parameters" if get.values.get("rope_parameters") else "rope_scaling")
    by_kind = rope.values.get("full_attention")
    return rope.part("full_attention") if isinstance(by_kind, Mapping) else rope


def _rope_scaling(rope: Metadata) -> RopeScaling | None:
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling("linear", rope.number("factor"))
    if kind == "llama3":
        return RopeScaling(
            "llama3",
            rope.number("factor"),
            rope.number("low_freq_factor"),
            rope.number("high_freq_factor"),
            rope.integer("original_max_position_embeddings"),
        )
    if kind == "yarn":
        return _yarn(rope)
    raise ModelLoadError(
        f"{rope.source}: rope scaling {kind!r} is not supported; supported: default, linear, llama3, yarn"
    )


def _yarn(rope: Metadata) -> RopeScaling:
    factor = rope.number("factor")
    return RopeScaling(
        "yarn",
        factor,
        original_max_position=rope.integer("original_max_position_embeddings"),
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        attention_factor=rope.number("attention_factor", _yarn_attention_factor(rope, factor)),
        truncate=rope.flag("truncate", True),
    )


def _yarn_attention_factor(rope: Metadata, factor: float) -> float:
    """YaRN's 0.1 ln(s) + 1, or the ratio of two such where the model names both weights of the logarithm."""
    over, under = rope.optional_number("mscale"), rope.optional_number("mscale_all_dim")
    if over is None or under is None:
        return yarn_attention_factor(factor)
    return yarn_attention_factor(factor, over) / yarn_attention_factor(factor, under)


def _with_shared_caches(config: ModelConfig, get: Metadata) -> ModelConfig:
    """The last `num_kv_shared_layers` read the keys and values of the last layer before them that has their window."""
    shared = get.integer("num_kv_shared_layers", 0)
    if not shared:
        return config
    own = config.num_layers - shared
    if not 0 < own < config.num_layers:
        raise get.unexpected("num_kv_shared_layers")
    windows = config.windows or (None,) * config.num_layers
    last = {window: layer for layer, window in enumerate(windows[:own])}
    if missing := set(windows[own:]) - set(last):
        raise ModelLoadError(
            f"{get.source}: num_kv_shared_layers leaves no layer of its own with window {missing.pop()}"
        )
    return replace(config, kv_sources=(*range(own), *(last[window] for window in windows[own:])))
