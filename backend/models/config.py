"""The shape of a model, whatever file it came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from backend.models.errors import ModelLoadError


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched for long contexts: "linear", or "llama3" (frequency bands)."""

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    family: str  # "llama": which file of backend/models runs it
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int  # longest context, in tokens
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False

    def limited_to(self, max_model_len: int | None) -> ModelConfig:
        """The same model with a shorter context; never a longer one."""
        if max_model_len is None:
            return self
        if not 1 <= max_model_len <= self.max_position:
            raise ModelLoadError(
                f"max_model_len must be between 1 and {self.max_position}, the model's own limit;"
                f" got {max_model_len}"
            )
        return replace(self, max_position=max_model_len)

    def check(self, source: str) -> ModelConfig:
        """Refuse shapes that no file of ours can run; `source` names the file in the error."""
        fault = self._fault()
        if fault:
            raise ModelLoadError(f"{source}: {fault}")
        return self

    def _fault(self) -> str | None:
        sizes = {
            "vocabulary size": self.vocab_size,
            "hidden size": self.hidden_size,
            "feed-forward size": self.intermediate_size,
            "number of layers": self.num_layers,
            "number of heads": self.num_heads,
            "number of KV heads": self.num_kv_heads,
            "head size": self.head_dim,
            "context length": self.max_position,
        }
        for name, value in sizes.items():
            if not 1 <= value <= 1 << 24:
                return f"the {name} is {value}"
        if self.num_layers > 1024 or self.head_dim > 1 << 16:
            return f"{self.num_layers} layers with heads of {self.head_dim} are no model"
        if self.num_heads % self.num_kv_heads:
            return f"{self.num_heads} heads cannot share {self.num_kv_heads} KV heads evenly"
        if self.head_dim % 2:
            return f"head size {self.head_dim} is odd: rotary embedding needs pairs"
        return None


def config_from_gguf(metadata: Mapping[str, Any], vocab_size: int, source: str) -> ModelConfig:
    """Read the `llama.*` keys of a GGUF file (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md)."""
    arch = metadata.get("general.architecture")
    if arch != "llama":
        raise ModelLoadError(f"{source}: architecture {arch!r} is not supported; supported: llama")
    get = _Reader({k[6:]: v for k, v in metadata.items() if k.startswith("llama.")}, source)
    if get.integer("expert_count", 0):
        raise ModelLoadError(f"{source}: mixture-of-experts models are not supported")
    hidden, heads = get.integer("embedding_length"), get.integer("attention.head_count")
    head_dim = get.integer("attention.key_length", hidden // max(1, heads))
    if get.integer("attention.value_length", head_dim) != head_dim:
        raise ModelLoadError(f"{source}: keys and values of different head sizes are not supported")
    if get.integer("rope.dimension_count", head_dim) != head_dim:
        raise ModelLoadError(f"{source}: partial rotary embedding is not supported")
    return ModelConfig(
        family="llama",
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=get.integer("feed_forward_length"),
        num_layers=get.integer("block_count"),
        num_heads=heads,
        num_kv_heads=get.integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        max_position=_window(
            get.integer("context_length"), get.integer("attention.sliding_window", 0)
        ),
        rms_norm_eps=get.number("attention.layer_norm_rms_epsilon"),
        rope_theta=get.number("rope.freq_base", 10000.0),
        rope_scaling=_gguf_rope_scaling(get, source),
    ).check(source)


_HF_FAMILIES = {"LlamaForCausalLM": "llama", "MistralForCausalLM": "llama"}


def config_from_hf(document: Mapping[str, Any], source: str) -> ModelConfig:
    """Read a transformers `config.json`."""
    get = _Reader(document, source)
    names = document.get("architectures") or []
    family = _HF_FAMILIES.get(names[0] if isinstance(names, list) and names else "")
    if family is None:
        supported = ", ".join(sorted(_HF_FAMILIES))
        raise ModelLoadError(
            f"{source}: architectures {names!r} not supported; supported: {supported}"
        )
    for key in ("attention_bias", "mlp_bias"):
        if document.get(key):
            raise ModelLoadError(f"{source}: {key} is not supported")
    if (act := document.get("hidden_act", "silu")) != "silu":
        raise ModelLoadError(f"{source}: hidden_act {act!r} is not supported; supported: silu")
    hidden, heads = get.integer("hidden_size"), get.integer("num_attention_heads")
    rope = document.get("rope_parameters") or document.get("rope_scaling") or {}
    return ModelConfig(
        family=family,
        vocab_size=get.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=get.integer("intermediate_size"),
        num_layers=get.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=get.integer("num_key_value_heads", heads),
        head_dim=get.integer("head_dim", hidden // max(1, heads)),
        max_position=_window(
            get.integer("max_position_embeddings"), get.integer("sliding_window", 0)
        ),
        rms_norm_eps=get.number("rms_norm_eps"),
        rope_theta=_Reader(rope, source).number("rope_theta", get.number("rope_theta", 10000.0)),
        rope_scaling=_hf_rope_scaling(rope, source),
        tie_word_embeddings=bool(document.get("tie_word_embeddings", False)),
    ).check(source)


class _Reader:
    """Typed look-ups; a missing or mistyped key names itself and its file. None counts as absent."""

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self._values, self._source = values, source

    def integer(self, key: str, default: int | None = None) -> int:
        return int(self._number(key, default, int))

    def number(self, key: str, default: float | None = None) -> float:
        return float(self._number(key, default, (int, float)))

    def _number(self, key: str, default: float | None, kind: Any) -> float:
        value = self._values.get(key)
        value = default if value is None else value
        if value is None:
            raise ModelLoadError(f"{self._source}: {key} is missing from the model's metadata")
        if isinstance(value, bool) or not isinstance(value, kind):
            raise ModelLoadError(f"{self._source}: {key} has the unexpected value {value!r:.60}")
        return value


def _window(max_position: int, sliding_window: int) -> int:
    """Inside its window a sliding-window model is a full-attention model, so serve it up to there."""
    return min(max_position, sliding_window) if sliding_window > 0 else max_position


def _gguf_rope_scaling(get: _Reader, source: str) -> RopeScaling | None:
    values = get._values
    kind = values.get("rope.scaling.type", "linear" if "rope.scale_linear" in values else "none")
    if kind in ("none", ""):
        return None
    if kind != "linear":
        raise ModelLoadError(f"{source}: rope scaling {kind!r} is not supported")
    return RopeScaling(
        "linear", get.number("rope.scaling.factor", get.number("rope.scale_linear", 1.0))
    )


def _hf_rope_scaling(rope: Mapping[str, Any], source: str) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    get = _Reader(rope, source)
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling("linear", get.number("factor"))
    if kind == "llama3":
        return RopeScaling(
            "llama3",
            get.number("factor"),
            get.number("low_freq_factor"),
            get.number("high_freq_factor"),
            get.integer("original_max_position_embeddings"),
        )
    raise ModelLoadError(f"{source}: rope scaling {kind!r} is not supported")
