"""Tiny random models of every family with the logits that transformers 5.24 computes for them in float32.

Each folder of data/families holds config.json, model.safetensors (bfloat16, so exact in float32) and
expected.safetensors: `ids` [44] and the `logits` [44, vocab] that belong to them. Windows are 8 tokens.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from backend.models.checkpoint import Checkpoint, SafetensorsCheckpoint
from backend.models.gguf import GGUFFile
from backend.models.gguf_checkpoint import GGUFCheckpoint
from backend.models.llama import Llama, read_llama_weights
from tests.backend.tiny_llama import interleaved

FOLDER = Path(__file__).parent / "data" / "families"
FAMILIES = sorted(path.name for path in FOLDER.iterdir())
# What GGUF calls the family, where it can hold the tiny model at all.
GGUF_ARCHS = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "gemma2": "gemma2",
    "gemma3": "gemma3",
}


def settings(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / name / "config.json").read_text())


def expected(name: str) -> tuple[list[int], Tensor]:
    file = load_file(FOLDER / name / "expected.safetensors")
    return file["ids"].tolist(), file["logits"]


def tensors(name: str) -> dict[str, Tensor]:
    return load_file(FOLDER / name / "model.safetensors")


def model(name: str, dtype: torch.dtype = torch.float32) -> Llama:
    return model_of(SafetensorsCheckpoint(FOLDER / name), dtype)


def model_of(checkpoint: Checkpoint, dtype: torch.dtype = torch.float32) -> Llama:
    return Llama(read_llama_weights(checkpoint, checkpoint.config), dtype)


def gguf_model(name: str, folder: Path) -> Llama:
    return model_of(GGUFCheckpoint(GGUFFile(write_gguf(name, folder / f"{name}.gguf"))))


def write_gguf(name: str, path: Path) -> Path:
    """As llama.cpp's converter writes it, by the gguf package's own table of tensor names."""
    config, arch = settings(name), GGUF_ARCHS[name]
    writer = gguf.GGUFWriter(path, arch)
    _write_settings(writer, config)
    names = gguf.get_tensor_name_map(_arch_id(arch), config["num_hidden_layers"])
    for stored, tensor in _stacked(_as_gguf_holds_them(name, config)).items():
        gguf_name = names.get_name(stored, try_suffixes=(".weight", ".bias"))
        assert gguf_name is not None, stored
        writer.add_tensor(gguf_name, np.ascontiguousarray(tensor.float().numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _arch_id(arch: str) -> gguf.MODEL_ARCH:
    return next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == arch)


def _write_settings(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config["rope_parameters"]
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    optional = {
        "num_local_experts": writer.add_expert_count,
        "num_experts": writer.add_expert_count,
        "num_experts_per_tok": writer.add_expert_used_count,
        "moe_intermediate_size": writer.add_expert_feed_forward_length,
        "shared_expert_intermediate_size": writer.add_expert_shared_feed_forward_length,
        "attn_logit_softcapping": writer.add_attn_logit_softcapping,
        "final_logit_softcapping": writer.add_final_logit_softcapping,
        "sliding_window": writer.add_sliding_window,
    }
    for key, add in optional.items():
        if config.get(key):
            add(config[key])
    if config["model_type"] == "gemma3_text":
        kinds = config["layer_types"]
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in kinds])


def _as_gguf_holds_them(name: str, config: dict[str, Any]) -> dict[str, Tensor]:
    out = {key: tensor.float() for key, tensor in tensors(name).items()}
    for key, tensor in out.items():
        if name.startswith("gemma") and key.endswith("norm.weight"):
            out[key] = tensor + 1
        if name == "gemma2" and ".q_proj." in key:  # there is no key for the scale of queries
            out[key] = tensor * (config["head_dim"] / config["query_pre_attn_scalar"]) ** 0.5
        if GGUF_ARCHS[name] == "llama" and (found := re.search(r"\.([qk])_proj\.", key)):
            heads = "num_attention_heads" if found[1] == "q" else "num_key_value_heads"
            rows = interleaved(tensor.view(tensor.shape[0], -1), config[heads])
            out[key] = rows.view(tensor.shape)
    if config["rope_parameters"].get("rope_type") == "llama3":
        config["rope_parameters"]["rope_type"] = "default"
        out["rope_freqs.weight"] = _llama3_divisors(config)
    return out


def _llama3_divisors(config: dict[str, Any]) -> Tensor:
    """By wavelength, as the Llama 3.1 release words it; files hold them in place of the four settings."""
    rope, half = config["rope_parameters"], config["head_dim"] // 2
    original = rope["original_max_position_embeddings"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    divisors = []
    for pair in range(half):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (pair / half)
        keep = min(1.0, max(0.0, (original / wavelength - low) / (high - low)))
        divisors.append(1 / (keep + (1 - keep) / rope["factor"]))
    return torch.tensor(divisors)


def _stacked(named: dict[str, Tensor]) -> dict[str, Tensor]:
    """The matrices of all experts in one tensor each."""
    out: dict[str, Any] = {}
    for key in sorted(named, key=_expert_number):
        stem = re.sub(r"\.experts\.\d+\.", ".experts.", key)
        if stem == key:
            out[key] = named[key]
        else:
            out.setdefault(stem, []).append(named[key])
    return {k: torch.stack(v) if isinstance(v, list) else v for k, v in out.items()}


def _expert_number(key: str) -> int:
    found = re.search(r"\.experts\.(\d+)\.", key)
    return int(found[1]) if found else -1
