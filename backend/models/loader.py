"""From a path to a model that can run: the door into backend.models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from backend.cpu.native import native_available
from backend.cpu.packed import PackedWeight
from backend.models.batch import Model
from backend.models.chat_template import ChatTemplate, TemplateError
from backend.models.checkpoint import Checkpoint, read_json
from backend.models.config import ModelConfig
from backend.models.errors import DemoModelUnavailable, ModelLoadError
from backend.models.gguf import GGUFFile
from backend.models.gguf_checkpoint import GGUFCheckpoint
from backend.models.gguf_tokenizer import tokenizer_from_gguf
from backend.models.hf_tokenizer import special_token_text, tokenizer_from_folder
from backend.models.llama import Llama, read_llama_weights
from backend.models.native_llama import build_native, unsupported
from backend.models.prequantized import open_folder
from backend.models.quantized import QUANTIZATIONS, ConvertedCheckpoint, in_quantization
from backend.models.tokenizer import Tokenizer

__all__ = ["DemoModelUnavailable", "LoadedModel", "ModelLoadError", "load_model"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_KV_DTYPES = {**_DTYPES, "int8": torch.int8}
_ACTIVATIONS = ("auto", "float32", "int8")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    model: Model
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None  # None: the model has none, so it only completes
    config: ModelConfig
    name: str  # the file's or folder's
    tier: str  # "native", or "portable (why)"


def load_model(
    path: Path,
    *,
    dtype: str = "auto",
    quantization: str = "auto",
    kv_cache_dtype: str = "auto",
    activations: str = "auto",
    max_model_len: int | None = None,
    threads: int | None = None,
    native: bool = True,
    convert: Callable[[str, PackedWeight], PackedWeight] | None = None,
) -> LoadedModel:
    """Load a GGUF file, or a transformers folder with safetensors.

    Args:
        dtype: of activations: "float32" (exact), "bfloat16", or "auto": float32 on the native tier, else
            bfloat16 where the processor multiplies it in hardware, else float32.
        quantization: "auto": weights as the file has them; "none": all dense; "w8" or "w4": the layers' matrices in
            that format (`backend.quant`); "w8a8": "w8" with activations "int8".
        kv_cache_dtype: "float32", "bfloat16", "int8" (a scale for each token and KV head), "auto": as `dtype`.
        activations: "float32" or "auto": they meet the weights as they are; "int8": rounded to bytes first, 32 columns
            to a scale, where the weights are in blocks (`activations.ROUNDED_FOR`); needs float32.
        max_model_len: a shorter context than the model's own, in tokens.
        threads: of torch, for the whole process; None leaves them as they are.
        native: whether the compiled float32 tier takes the model over where this machine has it.
        convert: what becomes of each tensor, by its transformers name, on its way into the model.

    Raises:
        ModelLoadError: one line that names the file and what is wrong with it.
    """
    _check_formats(quantization, activations, dtype, kv_cache_dtype)
    in_bytes = activations == "int8" or quantization == "w8a8"
    chosen_dtype = torch.float32 if in_bytes else _choose_dtype(dtype)
    chosen_activations = "int8" if in_bytes else "float32"
    if threads is not None:
        torch.set_num_threads(threads)
    parts = _read(path)
    config = parts.checkpoint.config.limited_to(max_model_len)
    if parts.tokenizer.vocab_size > config.vocab_size:
        raise ModelLoadError(
            f"{path}: {parts.tokenizer.vocab_size} tokens but only {config.vocab_size} embedding rows"
        )
    checkpoint = in_quantization(parts.checkpoint, quantization)
    if convert is not None:
        checkpoint = ConvertedCheckpoint(checkpoint, convert)
    weights = read_llama_weights(checkpoint, config)
    kv_dtype = _KV_DTYPES.get(kv_cache_dtype)
    why_portable = _why_portable(config, dtype) if native else "it was asked for"
    model: Model | None = None
    if why_portable is None:
        model = build_native(
            config, weights, threads=threads, activations=chosen_activations, kv_dtype=kv_dtype
        )
    if model is None:
        model = Llama(weights, chosen_dtype, chosen_activations, kv_dtype)
    tier = f"portable ({why_portable})" if why_portable else "native"
    return LoadedModel(model, parts.tokenizer, parts.chat_template, config, parts.name, tier)


def _why_portable(config: ModelConfig, dtype: str) -> str | None:
    """None: the native tier serves this model on this machine."""
    if dtype == "bfloat16":
        return "the native tier has no dtype bfloat16"
    return unsupported(config) or native_available()


def _check_formats(quantization: str, activations: str, dtype: str, kv_cache_dtype: str) -> None:
    for name, value, known in (
        ("quantization", quantization, QUANTIZATIONS),
        ("activations", activations, _ACTIVATIONS),
        ("dtype", dtype, ("auto", *_DTYPES)),
        ("kv_cache_dtype", kv_cache_dtype, ("auto", *_KV_DTYPES)),
    ):
        if value not in known:
            raise ModelLoadError(f"{name} must be one of {', '.join(known)}; got {value!r}")
    if quantization == "w8a8" and activations == "float32":
        raise ModelLoadError("quantization w8a8 needs activations int8 or auto; got float32")
    if dtype == "bfloat16" and activations == "int8":
        raise ModelLoadError("activations int8 needs dtype float32; got bfloat16")
    if dtype == "bfloat16" and quantization == "w8a8":
        raise ModelLoadError("quantization w8a8 needs dtype float32; got bfloat16")


def _choose_dtype(dtype: str) -> torch.dtype:
    if dtype == "auto":
        dtype = "bfloat16" if _multiplies_bfloat16() else "float32"
    return _DTYPES[dtype]


def _multiplies_bfloat16() -> bool:
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


@dataclass(frozen=True, slots=True)
class _Parts:
    checkpoint: Checkpoint
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    name: str


def _read(path: Path) -> _Parts:
    if path.is_dir() and (path / "config.json").exists():
        return _read_folder(path)
    if path.is_dir():
        return _read_gguf(_only_gguf(path))
    if not path.exists():
        raise ModelLoadError(f"{path}: no such file or folder")
    return _read_gguf(path)


def _only_gguf(folder: Path) -> Path:
    files = sorted(folder.glob("*.gguf"))
    if len(files) != 1:
        raise ModelLoadError(
            f"{folder}: neither a config.json nor exactly one .gguf file in it (found {len(files)})"
        )
    return files[0]


def _read_gguf(path: Path) -> _Parts:
    file = GGUFFile(path)
    checkpoint = GGUFCheckpoint(file)
    tokenizer = tokenizer_from_gguf(file.metadata, str(path))
    end = file.metadata.get("tokenizer.ggml.eos_token_id")
    eos_token = tokenizer.token_text(end) if isinstance(end, int) else ""
    bos_token = "" if tokenizer.bos_id is None else tokenizer.token_text(tokenizer.bos_id)
    key = "tokenizer.chat_template"
    texts = {"default": file.metadata.get(key), "tool_use": file.metadata.get(f"{key}.tool_use")}
    return _Parts(checkpoint, tokenizer, _template(texts, bos_token, eos_token, path), path.stem)


def _read_folder(folder: Path) -> _Parts:
    config_path = folder / "tokenizer_config.json"
    config = read_json(config_path) if config_path.exists() else {}
    bos_token, eos_token = (
        special_token_text(config.get(f"{end}_token")) for end in ("bos", "eos")
    )
    template = _template(_folder_templates(folder, config), bos_token, eos_token, folder)
    return _Parts(
        open_folder(folder),
        tokenizer_from_folder(folder),
        template,
        folder.resolve().name,
    )


def _folder_templates(folder: Path, config: Mapping[str, Any]) -> dict[Any, Any]:
    """By name. A file of its own wins over the entry of tokenizer_config.json, which is a text or a list."""
    own = folder / "chat_template.jinja"
    if own.exists():
        return {"default": own.read_text(encoding="utf-8")}
    value = config.get("chat_template")
    if isinstance(value, list):
        return {
            entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)
        }
    return {"default": value}


def _template(
    texts: Mapping[Any, Any], bos_token: str, eos_token: str, source: Path
) -> ChatTemplate | None:
    text, tool_text = texts.get("default"), texts.get("tool_use")
    if not isinstance(text, str) or not text:
        return None
    try:
        return ChatTemplate(text, tool_text=tool_text, bos_token=bos_token, eos_token=eos_token)
    except TemplateError as exc:
        raise ModelLoadError(f"{source}: {exc}") from exc
