"""A checkpoint whose weights are brought into the `quantization` that was asked for, as they are read."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from backend.cpu.packed import PackedWeight
from backend.models.block_checkpoint import BlockCheckpoint
from backend.models.checkpoint import Checkpoint
from backend.models.errors import ModelLoadError
from backend.models.prequantized import PrequantizedCheckpoint
from backend.quant.weights import FORMATS, is_quantized, quantize_weight, widened

QUANTIZATIONS = ("auto", "none", *FORMATS, "w8a8")


def in_quantization(checkpoint: Checkpoint, quantization: str) -> Checkpoint:
    """ "auto" leaves the file's own blocks; "none" widens them; others quantize the layers' matrices ("w8a8" as "w8").

    Raises ModelLoadError for a checkpoint that is quantized already in anything but "auto" and "none".
    """
    if quantization == "auto":
        return checkpoint
    if quantization == "none":
        return ConvertedCheckpoint(checkpoint, lambda _, weight: widened(weight))
    if isinstance(checkpoint, PrequantizedCheckpoint | BlockCheckpoint):
        raise ModelLoadError(
            f"{checkpoint.source}: already quantized; quantization must be auto or none, got {quantization}"
        )
    to = "w8" if quantization == "w8a8" else quantization
    return ConvertedCheckpoint(
        checkpoint,
        lambda name, weight: (
            quantize_weight(weight.dequantize(), to) if is_quantized(name) else weight
        ),
    )


class ConvertedCheckpoint:
    """Each tensor passes through `convert(name, weight)` once, when it is first asked for."""

    def __init__(
        self, checkpoint: Checkpoint, convert: Callable[[str, PackedWeight], PackedWeight]
    ) -> None:
        self.source, self.config = checkpoint.source, checkpoint.config
        self._checkpoint, self._convert = checkpoint, convert
        self._converted: dict[str, PackedWeight] = {}  # a model and its fingerprint both read

    def names(self) -> Iterable[str]:
        return self._checkpoint.names()

    def weight(self, name: str) -> PackedWeight:
        if name not in self._converted:
            try:
                self._converted[name] = self._convert(name, self._checkpoint.weight(name))
            except ValueError as exc:
                raise ModelLoadError(f"{self.source}: tensor {name}: {exc}") from exc
        return self._converted[name]
