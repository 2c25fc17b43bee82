"""Weights by their transformers names, whichever file they lie in.

Both kinds of checkpoint hand out q and k rows in the order that the rotate-half form of rotary embedding expects.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from safetensors import SafetensorError, safe_open
from torch import Tensor

from backend.cpu.packed import PackedWeight, pack
from backend.models.config import ModelConfig, config_from_gguf, config_from_hf
from backend.models.errors import ModelLoadError
from backend.models.gguf import GGUFFile

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


_GGUF_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_GGUF_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GGUFCheckpoint:
    def __init__(self, file: GGUFFile) -> None:
        self.source = str(file.path)
        self.file = file
        embedding = file.tensor("token_embd.weight")
        self.config = config_from_gguf(file.metadata, embedding.shape[0], self.source)
        self._stored_as = {_hf_name(stored): stored for stored in file.tensors}

    def names(self) -> Iterable[str]:
        return self._stored_as.keys()

    def stored_name(self, name: str) -> str:
        """The tensor of the file that `name` is, or is a part of."""
        return self._stored_as[name]

    def weight(self, name: str) -> PackedWeight:
        weight = self.file.tensor(self._stored_as.get(name, name))
        if name.endswith(".q_proj.weight"):
            return _unpermuted(weight, self.config.num_heads, self.source)
        if name.endswith(".k_proj.weight"):
            return _unpermuted(weight, self.config.num_kv_heads, self.source)
        return weight


def _hf_name(stored: str) -> str:
    """`blk.3.ffn_up.weight` is `model.layers.3.mlp.up_proj.weight`; what has no such name keeps its own."""
    stem = stored.removesuffix(".weight")
    if stem.startswith("blk.") and stem.count(".") == 2:
        _, layer, part = stem.split(".")
        return f"model.layers.{layer}.{_GGUF_LAYER.get(part, part)}.weight"
    return f"{_GGUF_TOP[stem]}.weight" if stem in _GGUF_TOP else stored


def _unpermuted(weight: PackedWeight, num_heads: int, source: str) -> PackedWeight:
    """Llama GGUFs interleave the two halves of each rotary head: row 2i of a head is i, row 2i + 1 is half + i.

    The head count is that of this very matrix; k has fewer under grouped-query attention.
    """
    rows = weight.shape[0]
    if rows % (2 * num_heads):
        raise ModelLoadError(f"{source}: {rows} rows of q or k do not make {num_heads} even heads")
    order = np.arange(rows).reshape(num_heads, rows // num_heads // 2, 2).swapaxes(1, 2).reshape(-1)
    return weight.rows_permuted(order)


class SafetensorsCheckpoint:
    """A transformers folder: `config.json` beside `model.safetensors` or its shards and their index."""

    def __init__(self, folder: Path) -> None:
        self.source = str(folder)
        self.config = config_from_hf(read_json(folder / "config.json"), str(folder / "config.json"))
        self._shard_of = _shards(folder)
        self._open: dict[Path, Any] = {}

    def names(self) -> Iterable[str]:
        return self._shard_of.keys()

    def weight(self, name: str) -> PackedWeight:
        tensor = self.tensor(name)
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
            return self._open[shard].get_tensor(name)
        except SafetensorError as exc:
            raise ModelLoadError(f"{shard}: {exc}") from exc


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
