"""A transformers folder again with some of its matrices in blocks; settings, tokenizer and template go along."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from backend.cpu.packed import PackedWeight
from backend.models.block_checkpoint import QUANT_METHOD, block_name
from backend.models.checkpoint import SafetensorsCheckpoint, read_json

SHARD_BYTES = 2 << 30
_SETTINGS = ("*.json", "*.jinja", "*.txt", "*.model", "*.md", "LICENSE*")
_INDEX = "model.safetensors.index.json"


def copy_folder(
    source: Path,
    target: Path,
    convert: Callable[[str, PackedWeight], PackedWeight | None],
    settings: Mapping[str, Any],
) -> None:
    """`convert(name, weight)` gives the blocks of a tensor, or None for one that stays as it is.

    `settings` join `quantization_config` of config.json.
    """
    for pattern in _SETTINGS:
        for path in source.glob(pattern):
            if path.is_file() and path.name != _INDEX:
                shutil.copyfile(path, target / path.name)
    document = read_json(target / "config.json")
    document["quantization_config"] = {"quant_method": QUANT_METHOD, **settings}
    (target / "config.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    shards = _Shards(target)
    checkpoint = SafetensorsCheckpoint(source)
    for name in checkpoint.names():
        tensor = checkpoint.tensor(name)
        blocks = convert(name, checkpoint.weight(name)) if tensor.dim() == 2 else None
        if blocks is None:
            shards.add(name, tensor)
        else:
            shards.add(block_name(name, blocks.kind), torch.from_numpy(blocks.raw))
    shards.close()


class _Shards:
    """Writes tensors to files of at most SHARD_BYTES, so that no more is held in memory."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._held: dict[str, Tensor] = {}
        self._held_bytes = 0
        self._weight_map: dict[str, str] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        num_bytes = tensor.numel() * tensor.element_size()
        if self._held and self._held_bytes + num_bytes > SHARD_BYTES:
            self._flush()
        self._held[name] = tensor.contiguous()
        self._held_bytes += num_bytes

    def close(self) -> None:
        self._flush()
        index = {"metadata": {}, "weight_map": self._weight_map}
        (self._folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def _flush(self) -> None:
        if not self._held:
            return
        file_name = f"model-{len(set(self._weight_map.values())) + 1:05d}.safetensors"
        save_file(self._held, self._folder / file_name, metadata={"format": "pt"})
        # `save_file` lets the owner alone read what it writes; a worker may be another user.
        shutil.copymode(self._folder / "config.json", self._folder / file_name)
        self._weight_map |= dict.fromkeys(self._held, file_name)
        self._held.clear()
        self._held_bytes = 0
