"""The `engine` table of a `[[providers]]` entry, and what the supervisor hands to a worker. No torch."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
from msgspec import Meta

from backend.engine.config import EngineConfig

Count = Annotated[int, Meta(ge=1)]
DRAFT, HEAD = "draft:", "head:"
SPECULATIVE_CHOICES = '"off" or "auto" or "ngram" or "draft:PATH" or "head:PATH"'


class EngineOptions(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Every key of the table with its default; None: decided from the model and the machine."""

    device: str = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    quantization: Literal["auto", "none", "w8", "w4", "w8a8"] = "auto"
    activations: Literal["auto", "float32", "int8"] = "auto"
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "int8"] = "auto"
    max_model_len: Annotated[int, Meta(ge=2)] | None = None
    max_num_seqs: Annotated[int, Meta(ge=1, le=4096)] = EngineConfig().max_num_seqs
    max_num_batched_tokens: Count = EngineConfig().max_num_batched_tokens
    kv_cache_gb: Annotated[float, Meta(gt=0, le=1e6)] | None = None
    gpu_memory_utilization: Annotated[float, Meta(gt=0, le=1)] | None = None
    speculative: Annotated[str, Meta(pattern=r"^(off|auto|ngram|draft:.+|head:.+)$")] = "off"
    tensor_parallel_size: Count = 1
    replicas: Annotated[int, Meta(ge=1, le=64)] = 1
    deterministic: bool = False
    threads: Annotated[int, Meta(ge=1, le=1024)] | None = None
    num_blocks: Count | None = None  # KV blocks, in place of kv_cache_gb
    pooling: Literal["auto", "mean", "last"] = "auto"  # of embeddings
    reasoning: Literal["auto", "off"] = "auto"  # off: <think> blocks stay in the text

    @property
    def draft_path(self) -> str:
        """Folder or .gguf file of the draft model; "": there is none."""
        return self.speculative.removeprefix(DRAFT) if self.speculative.startswith(DRAFT) else ""

    @property
    def head_path(self) -> str:
        """Folder or file of a trained draft head; "": there is none."""
        return self.speculative.removeprefix(HEAD) if self.speculative.startswith(HEAD) else ""

    def engine_config(self) -> EngineConfig:
        return EngineConfig(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            kv_cache_gb=self.kv_cache_gb,
            max_model_len=self.max_model_len,
            num_blocks=self.num_blocks,
            deterministic=self.deterministic,
            speculative="ngram" if self.speculative in ("auto", "ngram") else "off",
            pooling="mean" if self.pooling == "auto" else self.pooling,
        )


class WorkerSettings(msgspec.Struct, frozen=True):
    """The one frame that a worker reads from its standard input."""

    name: str  # "local/0": provider and replica, for what it prints
    socket_path: str
    model_path: str  # a folder, a .gguf file, "demo" or "hub:owner/name"
    data_dir: str
    template: str = ""  # a Jinja file; "": the model's own
    threads: int = 1
    options: EngineOptions = EngineOptions()


_FIELDS = {field.name: field for field in msgspec.structs.fields(EngineOptions)}
# What the table can name and this version cannot do: refused in words, never ignored.
_NOT_BUILT: dict[str, tuple[tuple[Any, ...], str]] = {
    "device": (("auto", "cpu"), "only the CPU engine is built so far; use auto or cpu"),
    "gpu_memory_utilization": ((None,), "is for GPUs, which are not built yet; use kv_cache_gb"),
    "tensor_parallel_size": ((1,), "tensor parallelism is not built yet; use 1, or replicas"),
}


def option_faults(table: Mapping[str, Any]) -> list[str]:
    """What is wrong with the table, one sentence for each key: `engine.max_seqs: unknown key; nearest: ...`."""
    return [
        f"engine.{key}: {fault}" for key, value in table.items() if (fault := _fault(key, value))
    ]


def parse_options(table: Mapping[str, Any]) -> EngineOptions:
    """Raises msgspec.ValidationError where `option_faults` finds something."""
    return msgspec.convert(dict(table), EngineOptions)


def _fault(key: str, value: Any) -> str | None:
    if key not in _FIELDS:
        nearest = difflib.get_close_matches(key, _FIELDS, n=1, cutoff=0.0)
        return f"unknown key; nearest: {nearest[0]}"
    try:
        msgspec.convert(value, _FIELDS[key].type)
    except msgspec.ValidationError as exc:
        if choices := _choices(key):
            return f"must be {choices}, got {value!r}"
        text = str(exc)
        return f"{text[:1].lower()}{text[1:]}, got {value!r}"
    allowed, sentence = _NOT_BUILT.get(key, ((value,), ""))
    return None if value in allowed else f"{value!r}: {sentence}"


def _choices(key: str) -> str:
    """What a key of a few words may be, told in words; "" for keys of another kind."""
    if key == "speculative":
        return SPECULATIVE_CHOICES
    kind = _FIELDS[key].type
    return (
        " or ".join(f'"{word}"' for word in get_args(kind)) if get_origin(kind) is Literal else ""
    )
