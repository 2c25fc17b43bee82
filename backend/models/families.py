"""Which architectures we serve, and what each adds to the plain decoder: one file a family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from backend.models import gemma, mixtral, qwen
from backend.models.config import ModelConfig
from backend.models.metadata import Metadata

Adjust = Callable[[ModelConfig, Metadata], ModelConfig]


def _as_it_is(config: ModelConfig, get: Metadata) -> ModelConfig:
    return config


@dataclass(frozen=True, slots=True)
class Family:
    """`from_hf` and `from_gguf` complete a plain config from the settings of the one file format or the other.

    `gguf_layer_names` are its own names of a layer's tensors, by those of GGUF.
    """

    name: str
    hf_names: tuple[str, ...]  # entries of `architectures`
    gguf_names: tuple[str, ...]  # `general.architecture`
    from_hf: Adjust
    from_gguf: Adjust
    hf_defaults: Mapping[str, Any] = field(default_factory=dict[str, Any])
    hf_norms_store_offset: bool = False  # safetensors hold w where the norm multiplies by 1 + w
    gguf_rotary_interleaved: bool = False  # q and k rows of GGUF files lie in pairs
    gguf_layer_names: Mapping[str, str] = field(default_factory=dict[str, str])


FAMILIES = (
    Family(
        "llama",
        ("LlamaForCausalLM",),
        ("llama",),
        _as_it_is,
        mixtral.from_llama_gguf,  # GGUF writers name Mistral and Mixtral "llama" too
        gguf_rotary_interleaved=True,
    ),
    Family("mistral", ("MistralForCausalLM",), (), mixtral.mistral_from_hf, _as_it_is),
    Family("mixtral", ("MixtralForCausalLM",), (), mixtral.from_hf, _as_it_is),
    Family("qwen2", ("Qwen2ForCausalLM",), ("qwen2",), qwen.qwen2_from_hf, qwen.qwen2_from_gguf),
    Family("qwen3", ("Qwen3ForCausalLM",), ("qwen3",), qwen.qwen3_from_hf, qwen.qwen3_from_gguf),
    Family(
        "qwen2_moe",
        ("Qwen2MoeForCausalLM",),
        ("qwen2moe",),
        qwen.qwen2_moe_from_hf,
        qwen.qwen2_moe_from_gguf,
    ),
    Family(
        "qwen3_moe",
        ("Qwen3MoeForCausalLM",),
        ("qwen3moe",),
        qwen.qwen3_moe_from_hf,
        qwen.qwen3_moe_from_gguf,
    ),
    Family(
        "gemma2",
        ("Gemma2ForCausalLM",),
        ("gemma2",),
        gemma.gemma2_from_hf,
        gemma.gemma2_from_gguf,
        hf_defaults=gemma.GEMMA2_DEFAULTS,
        hf_norms_store_offset=True,
        gguf_layer_names=gemma.GGUF_LAYER_NAMES,
    ),
    Family(
        "gemma3",
        ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
        ("gemma3",),
        gemma.gemma3_from_hf,
        gemma.gemma3_from_gguf,
        hf_defaults=gemma.GEMMA3_DEFAULTS,
        hf_norms_store_offset=True,
        gguf_layer_names=gemma.GGUF_LAYER_NAMES,
    ),
)


def family_named(name: str) -> Family:
    return next(family for family in FAMILIES if family.name == name)


def hf_family(architecture: str) -> Family | None:
    return next((family for family in FAMILIES if architecture in family.hf_names), None)


def gguf_family(architecture: str) -> Family | None:
    return next((family for family in FAMILIES if architecture in family.gguf_names), None)
