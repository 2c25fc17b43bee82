"""Weights by their transformers names, whichever file they lie in, and those of a transformers folder.

Every kind of checkpoint hands out q and k rows in the order that the rotate-half form of rotary embedding expects,
norms as the factors that they are, and each expert's matrices by themselves.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError, safe_open
from torch import Tensor

from backend.cpu.packed import PackedWeight, pack
from backend.models.config import ModelConfig
from backend.models.errors import ModelLoadError
from backend.models.families import family_named
from backend.models.hf_config import config_from_hf

_SAMPLE_BYTES = 1 << 12


class Checkpoint(Protocol):
    source: str  # the path, for error messages
    config: ModelConfig

    def names(self) -> Iterable[str]: ...

    def weight(self, name: str) -> PackedWeight:
        """Raises ModelLoadError when there is none of that name."""
        ...


def checkpoint_fingerprint(checkpoint: Checkpoint) -> str:
    """Equal for equal weights; reads the ends of every tensor, so it takes milliseconds on any size of model."""
    digest = hashlib.sha256(repr(checkpoint.config).encode())
    for name in sorted(checkpoint.names()):
        weight = checkpoint.weight(name)
        flat = weight.raw.reshape(-1)
        digest.update(f"{name} {weight.kind} {weight.shape}".encode())
        digest.update(flat[:_SAMPLE_BYTES].tobytes())
        digest.update(flat[-_SAMPLE_BYTES:].tobytes())
    return digest.hexdigest()[:16]


class SafetensorsCheckpoint:
    """A transformers folder: `config.json` beside `model.safetensors` or its shards and their index."""

    def __init__(self, folder: Path) -> None:
        self.source = str(folder)
        self.config = config_from_hf(read_json(folder / "config.json"), str(folder / "config.json"))
        stored = _shards(folder)
        self._stored_as = {_plain_name(name): name for name in stored}
        self._shard_of = {plain: stored[name] for plain, name in self._stored_as.items()}
        self._norms_store_offset = family_named(self.config.family).hf_norms_store_offset
        self._open: dict[Path, Any] = {}

    def names(self) -> Iterable[str]:
        return self._shard_of.keys()

    def weight(self, name: str) -> PackedWeight:
        tensor = self.tensor(name)
        if self._norms_store_offset and name.endswith("norm.weight"):
            tensor = tensor.float() + 1
        try:
            return pack(tensor)
        except KeyError as exc:
            raise ModelLoadError(
                f"{self.source}: tensor {name} is stored as {exc.args[0]}"
            ) from exc

    def tensor(self, name: str) -> Tensor:
        """As it is stored. Raises ModelLoadError."""
        shard = self._shard_of.get(name)
        if shard is None:
            raise ModelLoadError(f"{self.source}: tensor {name} is missing")
        try:
            if shard not in self._open:
                self._open[shard] = _open_shard(shard)
            return self._open[shard].get_tensor(self._stored_as[name])
        except SafetensorError as exc:
            raise ModelLoadError(f"{shard}: {exc}") from exc


# Models that also see keep their language part one level down; Mixtral has names of its own.
_OTHER_NAMES = (
    (re.compile(r"^(language_model\.model|model\.language_model)\."), "model."),
    (re.compile(r"^language_model\.lm_head\."), "lm_head."),
    (re.compile(r"\.block_sparse_moe\."), ".mlp."),
    (re.compile(r"(\.experts\.\d+)\.w1\."), r"\1.gate_proj."),
    (re.compile(r"(\.experts\.\d+)\.w2\."), r"\1.down_proj."),
    (re.compile(r"(\.experts\.\d+)\.w3\."), r"\1.up_proj."),
)


def _plain_name(stored: str) -> str:
    for pattern, plain in _OTHER_NAMES:
        stored = pattern.sub(plain, stored)
    return stored


def _shards(folder: Path) -> dict[str, Path]:
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, Mapping):
            raise ModelLoadError(f"{index}: weight_map is missing")
        return {name: folder / Path(str(shard)).name for name, shard in weight_map.items()}
    if not single.exists() and len(others := list(folder.glob("*.safetensors"))) == 1:
        single = others[0]  # quantizers name it after bits and groups
    return dict.fromkeys(_open_shard(single).keys(), single)


def _open_shard(path: Path) -> Any:
    try:
        return safe_open(str(path), framework="pt")
    except FileNotFoundError:
        raise ModelLoadError(f"{path}: no such file") from None
    except (SafetensorError, OSError) as exc:
        raise ModelLoadError(f"{path}: not a readable safetensors file ({exc})") from exc


def read_json(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelLoadError(f"{path}: no such file") from None
    except (OSError, ValueError) as exc:
        raise ModelLoadError(f"{path}: cannot be read as JSON ({exc})") from exc
    if not isinstance(document, dict):
        raise ModelLoadError(f"{path}: expected a JSON object")
    return document
