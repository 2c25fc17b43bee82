"""GPTQ and AWQ checkpoints: which of them a folder holds, and their matrices as packed weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from backend.cpu.packed import PackedWeight, pack_affine
from backend.models.block_checkpoint import QUANT_METHOD, BlockCheckpoint
from backend.models.checkpoint import Checkpoint, SafetensorsCheckpoint, read_json
from backend.models.errors import ModelLoadError
from backend.quant.affine import AffineWeight
from backend.quant.awq import read_awq
from backend.quant.gptq import read_gptq

_SETTINGS_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}  # of older writers
_PARTS = ("qweight", "qzeros", "scales", "g_idx")
_GPTQ_FORMATS = ("gptq", "gptq_v2")

MatrixReader = Callable[[Mapping[str, Tensor]], AffineWeight]


def open_folder(folder: Path) -> Checkpoint:
    """The checkpoint in a transformers folder, quantized or not. Raises ModelLoadError."""
    checkpoint = SafetensorsCheckpoint(folder)
    source, settings = _settings(folder)
    if settings is not None and settings.get("quant_method") == QUANT_METHOD:
        return BlockCheckpoint(checkpoint)
    if settings is not None:
        return PrequantizedCheckpoint(checkpoint, _matrix_reader(settings, source))
    if any(name.endswith(".qweight") for name in checkpoint.names()):
        raise ModelLoadError(
            f"{folder}: quantized tensors (.qweight) but no quantization_config in config.json"
        )
    return checkpoint


def _settings(folder: Path) -> tuple[str, Mapping[str, Any] | None]:
    """Where they stand, and `quantization_config` of config.json, or what older writers put into a file of its own."""
    document = read_json(folder / "config.json")
    if isinstance(document.get("quantization_config"), dict):
        return f"{folder / 'config.json'}: quantization_config", document["quantization_config"]
    for name, method in _SETTINGS_FILES.items():
        if (folder / name).exists():
            return str(folder / name), {"quant_method": method, **read_json(folder / name)}
    return str(folder), None


def _matrix_reader(settings: Mapping[str, Any], source: str) -> MatrixReader:
    method = settings.get("quant_method")
    if method == "gptq":
        return _gptq_reader(settings, source)
    if method == "awq":
        return _awq_reader(settings, source)
    raise ModelLoadError(
        f"{source}: quant_method {method!r} is not supported; supported: gptq, awq, {QUANT_METHOD}"
    )


def _gptq_reader(settings: Mapping[str, Any], source: str) -> MatrixReader:
    stored_as = settings.get("checkpoint_format") or settings.get("format") or "gptq"
    if settings.get("is_marlin_format"):
        stored_as = "marlin"
    _check(source, "checkpoint_format", stored_as, _GPTQ_FORMATS)
    _check(source, "bits", settings.get("bits"), (4, 8))
    _check(source, "pack_dtype", settings.get("pack_dtype", "int32"), ("int32",))
    rules = settings.get("dynamic") or {}
    if any("sym" in rule for rule in rules.values() if isinstance(rule, dict)):
        raise ModelLoadError(f"{source}: dynamic rules that set sym are not supported")
    sym, v2 = settings.get("sym") is True, stored_as == "gptq_v2"
    return lambda parts: read_gptq(parts, sym=sym, v2=v2)


def _awq_reader(settings: Mapping[str, Any], source: str) -> MatrixReader:
    _check(source, "bits", settings.get("bits", settings.get("w_bit")), (4,))
    layout = settings.get("version") or settings.get("format") or "gemm"
    _check(source, "version", str(layout).lower(), ("gemm",))
    _check(source, "zero_point", settings.get("zero_point", True), (True,))
    return read_awq


def _check(source: str, key: str, value: Any, supported: tuple[Any, ...]) -> None:
    if value not in supported:
        known = ", ".join(str(each) for each in supported)
        raise ModelLoadError(f"{source}: {key} {value!r} is not supported; supported: {known}")


class PrequantizedCheckpoint:
    """`X.weight` is made of `X.qweight`, `X.qzeros`, `X.scales` and `X.g_idx` where these are there."""

    def __init__(self, checkpoint: SafetensorsCheckpoint, read_matrix: MatrixReader) -> None:
        self.source, self.config = checkpoint.source, checkpoint.config
        self._checkpoint, self._read_matrix = checkpoint, read_matrix
        self._stored = frozenset(checkpoint.names())
        self._packed: dict[str, PackedWeight] = {}  # a model and its fingerprint both read

    def names(self) -> Iterable[str]:
        for name in self._stored:
            stem, _, part = name.rpartition(".")
            if part == "qweight":
                yield f"{stem}.weight"
            elif part not in _PARTS:
                yield name

    def weight(self, name: str) -> PackedWeight:
        stem = name.removesuffix(".weight")
        if f"{stem}.qweight" not in self._stored:
            return self._checkpoint.weight(name)
        if name not in self._packed:
            self._packed[name] = self._packed_matrix(stem)
        return self._packed[name]

    def _packed_matrix(self, stem: str) -> PackedWeight:
        parts = {
            part: self._checkpoint.tensor(f"{stem}.{part}")
            for part in _PARTS
            if part != "g_idx" or f"{stem}.{part}" in self._stored
        }
        try:
            _check_parts(parts)
            return pack_affine(self._read_matrix(parts))
        except (ValueError, RuntimeError) as exc:
            reason = str(exc).splitlines()[0]  # torch's own may have several
            raise ModelLoadError(f"{self.source}: tensor {stem}.qweight: {reason}") from exc


def _check_parts(parts: Mapping[str, Tensor]) -> None:
    for part, tensor in parts.items():
        if part != "g_idx" and (tensor.dim() != 2 or not tensor.numel()):
            raise ValueError(f"{part} is {list(tensor.shape)}, expected rows and columns")
        if tensor.is_floating_point() != (part == "scales") or tensor.dtype == torch.int64:
            raise ValueError(f"{part} is stored as {tensor.dtype}, expected 32-bit words or floats")
