"""Folders that `tidegate quantize` writes: transformers folders whose matrices may lie as rows of blocks.

The matrix `X` in blocks of the kind K (`backend.quant.blocks`) is the uint8 tensor `X.K` [rows, bytes of a row]; every
other tensor is as transformers has it. `quantization_config.quant_method` in config.json is "tidegate".
"""

from __future__ import annotations

from collections.abc import Iterable

from backend.cpu.packed import PackedWeight
from backend.models.checkpoint import SafetensorsCheckpoint
from backend.models.errors import ModelLoadError
from backend.quant.blocks import KINDS, unpack_blocks

QUANT_METHOD = "tidegate"


def block_name(name: str, kind: str) -> str:
    return f"{name}.{kind}"


class BlockCheckpoint:
    def __init__(self, checkpoint: SafetensorsCheckpoint) -> None:
        self.source, self.config = checkpoint.source, checkpoint.config
        self._checkpoint = checkpoint
        self._kinds: dict[str, str | None] = {}  # None: not in blocks
        for stored in checkpoint.names():
            name, _, kind = stored.rpartition(".")
            is_blocks = kind in KINDS
            self._kinds[name if is_blocks else stored] = kind if is_blocks else None

    def names(self) -> Iterable[str]:
        return self._kinds.keys()

    def weight(self, name: str) -> PackedWeight:
        kind = self._kinds.get(name)
        if kind is None:
            return self._checkpoint.weight(name)
        stored = block_name(name, kind)
        raw = self._checkpoint.tensor(stored).numpy()
        try:
            cols = unpack_blocks(kind, raw[:1]).codes.shape[1]
        except (RuntimeError, ValueError, IndexError) as exc:
            raise ModelLoadError(
                f"{self.source}: tensor {stored} of {list(raw.shape)} bytes is no rows of {kind} blocks"
            ) from exc
        return PackedWeight(kind, raw, (raw.shape[0], cols))
