"""Which tensors of a checkpoint become blocks, and the copy that holds them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from gguf import GGMLQuantizationType

from backend.cpu.packed import PackedWeight
from backend.models.checkpoint import SafetensorsCheckpoint
from backend.models.errors import ModelLoadError
from backend.models.gguf import GGUFFile
from backend.models.gguf_checkpoint import GGUFCheckpoint
from backend.quant.weights import is_quantized, quantize_weight
from backend.quantize.calibration import InputMoments
from backend.quantize.folder_copy import copy_folder
from backend.quantize.gguf_copy import copy_gguf


@dataclass(frozen=True, slots=True)
class Conversion:
    """To "w8" or "w4"; `moments` of the inputs where a text was given."""

    to: str
    group_size: int
    moments: InputMoments | None = None

    def count(self, source: Path) -> int:
        """How many matrices `write` will quantize. Raises ModelLoadError."""
        if source.is_file():
            return len(_quantized_tensors(GGUFCheckpoint(GGUFFile(source))))
        return sum(map(is_quantized, SafetensorsCheckpoint(source).names()))

    def write(self, source: Path, folder: Path, advance: Callable[[int], object]) -> None:
        """Fill `folder` with the copy of a .gguf file or a transformers folder; `advance(1)` after each matrix.

        Raises ModelLoadError for a matrix that cannot be quantized, by name.
        """
        if source.is_file():
            self._write_gguf(GGUFFile(source), folder, advance)
        else:
            self._write_folder(source, folder, advance)

    def _write_gguf(self, file: GGUFFile, folder: Path, advance: Callable[[int], object]) -> None:
        chosen = _quantized_tensors(GGUFCheckpoint(file))

        def convert(stored: str, weight: PackedWeight) -> PackedWeight:
            if stored not in chosen:
                return weight
            advance(1)
            blocks = self._blocks(chosen[stored], weight, str(file.path))
            # Scales beyond float16 have blocks of ours alone; such a tensor is left as it is.
            return blocks if blocks.kind in GGMLQuantizationType.__members__ else weight

        copy_gguf(file, folder / f"{file.path.stem}-{self.to}.gguf", convert)

    def _write_folder(self, source: Path, folder: Path, advance: Callable[[int], object]) -> None:
        def convert(name: str, weight: PackedWeight) -> PackedWeight | None:
            if not is_quantized(name):
                return None
            advance(1)
            return self._blocks([name], weight, str(source))

        group = {"group_size": self.group_size} if self.to == "w4" else {}
        copy_folder(source, folder, convert, {"format": self.to, **group})

    def _blocks(self, names: list[str], weight: PackedWeight, source: str) -> PackedWeight:
        """`names`: what the tensor is to the model; several experts may lie in one."""
        known = [] if self.moments is None else map(self.moments.importance, names)
        found = [importance for importance in known if importance is not None]
        importance = torch.stack(found).mean(0) if found else None
        try:
            return quantize_weight(weight.dequantize(), self.to, self.group_size, importance)
        except ValueError as exc:
            raise ModelLoadError(f"{source}: tensor {names[0]}: {exc}") from exc


def _quantized_tensors(checkpoint: GGUFCheckpoint) -> dict[str, list[str]]:
    """Names in the file, and what the model calls their parts."""
    chosen: dict[str, list[str]] = {}
    for name in checkpoint.names():
        if is_quantized(name):
            chosen.setdefault(checkpoint.stored_name(name), []).append(name)
    return chosen
