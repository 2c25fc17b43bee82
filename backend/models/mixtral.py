"""Mistral and Mixtral: Llama with a sliding window, and with experts. Their GGUF files call themselves "llama"."""

from __future__ import annotations

from dataclasses import replace

from backend.models.config import ExpertConfig, ModelConfig
from backend.models.metadata import Metadata

_MISTRAL_WINDOW = 4096  # of a config.json that leaves it out; null there means none


def mistral_from_hf(config: ModelConfig, get: Metadata) -> ModelConfig:
    absent = _MISTRAL_WINDOW if "sliding_window" not in get.values else 0
    return _with_window(config, get.integer("sliding_window", absent))


def from_hf(config: ModelConfig, get: Metadata) -> ModelConfig:
    experts = ExpertConfig(
        num_experts=get.integer("num_local_experts"),
        per_token=get.integer("num_experts_per_tok"),
        intermediate_size=config.intermediate_size,
        renormalize=True,
    )
    return _with_window(replace(config, experts=experts), get.integer("sliding_window", 0))


def from_llama_gguf(config: ModelConfig, get: Metadata) -> ModelConfig:
    config = _with_window(config, get.integer("attention.sliding_window", 0))
    if not get.integer("expert_count", 0):
        return config
    experts = ExpertConfig(
        num_experts=get.integer("expert_count"),
        per_token=get.integer("expert_used_count"),
        intermediate_size=get.integer("expert_feed_forward_length", config.intermediate_size),
        renormalize=True,
    )
    return replace(config, experts=experts)


def _with_window(config: ModelConfig, window: int) -> ModelConfig:
    return replace(config, windows=(window,) * config.num_layers) if window > 0 else config
