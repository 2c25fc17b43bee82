"""The shape of a model from GGUF metadata (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md)."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from backend.models.config import ModelConfig, RopeScaling, yarn_attention_factor
from backend.models.errors import ModelLoadError
from backend.models.families import FAMILIES, Family, gguf_family
from backend.models.metadata import Metadata


def config_from_gguf(
    metadata: Mapping[str, Any], vocab_size: int, source: str, tensors: Container[str] = ()
) -> ModelConfig:
    """Read the keys that begin with the architecture's name; `tensors` are the names of the file's.

    Raises:
        ModelLoadError: an unknown architecture; a key missing, mistyped or not supported.
    """
    arch = metadata.get("general.architecture")
    family = gguf_family(str(arch))
    if family is None:
        supported = ", ".join(sorted(name for family in FAMILIES for name in family.gguf_names))
        raise ModelLoadError(
            f"{source}: architecture {arch!r} is not supported; supported: {supported}"
        )
    prefix = f"{arch}."
    own = {k.removeprefix(prefix): v for k, v in metadata.items() if k.startswith(prefix)}
    get = Metadata(own, source)
    plain = _plain_config(family, get, vocab_size, tensors)
    return family.from_gguf(plain, get).check(source)


def _plain_config(
    family: Family, get: Metadata, vocab_size: int, tensors: Container[str]
) -> ModelConfig:
    hidden, heads = get.integer("embedding_length"), get.integer("attention.head_count")
    head_dim = get.integer("attention.key_length", hidden // max(1, heads))
    if get.integer("attention.value_length", head_dim) != head_dim:
        raise get.refuse("a size of values' heads that differs from that of keys")
    if get.integer("rope.dimension_count", head_dim) != head_dim:
        raise get.refuse("partial rotary embedding")
    return ModelConfig(
        family=family.name,
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=get.integer("feed_forward_length"),
        num_layers=get.integer("block_count"),
        num_heads=heads,
        num_kv_heads=get.integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        max_position=get.integer("context_length"),
        rms_norm_eps=get.number("attention.layer_norm_rms_epsilon"),
        rope_theta=get.number("rope.freq_base", 10000.0),
        rope_scaling=_rope_scaling(get),
        attention_bias="blk.0.attn_q.bias" in tensors,
        attention_out_bias="blk.0.attn_output.bias" in tensors,
        qk_norm="blk.0.attn_q_norm.weight" in tensors,
    )


def _rope_scaling(get: Metadata) -> RopeScaling | None:
    kind = get.text("rope.scaling.type", "linear" if "rope.scale_linear" in get.values else "none")
    if kind in ("none", ""):
        return None
    factor = get.number("rope.scaling.factor", get.number("rope.scale_linear", 1.0))
    if kind == "linear":
        return RopeScaling("linear", factor)
    if kind != "yarn":
        raise ModelLoadError(
            f"{get.source}: rope scaling {kind!r} is not supported; supported: none, linear, yarn"
        )
    return RopeScaling(
        "yarn",
        factor,
        original_max_position=get.integer("rope.scaling.original_context_length"),
        beta_fast=get.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=get.number("rope.scaling.yarn_beta_slow", 1.0),
        attention_factor=yarn_attention_factor(factor)
        * get.number("rope.scaling.attn_factor", 1.0),
    )
