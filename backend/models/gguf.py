"""GGUF files (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md): metadata, and tensors mapped, not read.

Every count and offset is checked against the size of the file before it is followed, so a damaged file ends in
one ModelLoadError: never in a hang, a huge allocation or a read past the end.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType

from backend.cpu.packed import KINDS, PackedWeight, bytes_per_row
from backend.models.errors import ModelLoadError

_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_STRING, _ARRAY = 8, 9
_U32, _U64 = _SCALARS[4], _SCALARS[10]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    kind: str
    dims: tuple[int, ...]  # outermost first, as torch counts (the file lists the innermost first)
    offset: int  # bytes from the start of the file
    num_bytes: int


class GGUFFile:
    """An open GGUF file: `metadata`, `tensors`, and `tensor(name)` as blocks over the mapped bytes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._bytes = _map(path)
        try:
            self._parse(_Cursor(self._bytes))
        except (struct.error, IndexError):
            raise ModelLoadError(f"{path}: the file ends inside its header (truncated?)") from None
        except _DamagedError as exc:
            raise ModelLoadError(f"{path}: {exc}") from None

    def tensor(self, name: str) -> PackedWeight:
        info = self.tensors.get(name)
        if info is None:
            raise ModelLoadError(f"{self.path}: tensor {name} is missing")
        rows, cols = prod(info.dims[:-1]), info.dims[-1]
        raw = self._bytes[info.offset : info.offset + info.num_bytes].reshape(rows, -1)
        return PackedWeight(info.kind, raw, (rows, cols))

    def _parse(self, cursor: _Cursor) -> None:
        if bytes(cursor.take(4)) != b"GGUF":
            raise _DamagedError("not a GGUF file")
        version = cursor.scalar(_U32)
        if version not in (2, 3):
            raise _DamagedError(f"GGUF version {version} is not supported; supported: 2 and 3")
        num_tensors, num_keys = cursor.scalar(_U64), cursor.scalar(_U64)
        self.metadata: dict[str, Any] = {}
        metadata_start = cursor.at
        for _ in range(num_keys):
            key = cursor.string()
            self.metadata[key] = cursor.value(cursor.scalar(_U32))
        # As they stand: a copy of the file carries them along, types and all.
        self.num_keys, self.metadata_bytes = num_keys, self._bytes[metadata_start : cursor.at]
        heads = dict(_tensor_head(cursor) for _ in range(num_tensors))
        align = self.metadata.get("general.alignment", 32)
        if not isinstance(align, int) or align < 1:
            raise _DamagedError(f"general.alignment is {align!r}")
        self.alignment = align
        start = -(-cursor.at // align) * align
        self.tensors = {
            name: replace(info, offset=start + info.offset) for name, info in heads.items()
        }
        for name, info in self.tensors.items():
            if (missing := info.offset + info.num_bytes - len(self._bytes)) > 0:
                raise _DamagedError(
                    f"truncated: tensor {name} ends {missing} bytes past the end of the file"
                )


class _DamagedError(Exception):
    """What is wrong with the bytes; the path is added where it is caught."""


def _map(path: Path) -> np.ndarray:
    try:
        if path.stat().st_size == 0:
            raise ModelLoadError(f"{path}: the file is empty")
        return np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
    except FileNotFoundError:
        raise ModelLoadError(f"{path}: no such file") from None
    except OSError as exc:
        raise ModelLoadError(f"{path}: cannot be read ({exc.strerror or exc})") from exc


def _tensor_head(cursor: _Cursor) -> tuple[str, TensorInfo]:
    """Name and layout of one tensor; its offset still counts from the start of the tensor data."""
    name = cursor.string()
    num_dims = cursor.scalar(_U32)
    if not 1 <= num_dims <= 4:
        raise _DamagedError(f"tensor {name[:60]!r} has {num_dims} dimensions")
    dims = tuple(cursor.scalar(_U64) for _ in range(num_dims))[::-1]
    kind, offset = _kind(cursor.scalar(_U32), name), cursor.scalar(_U64)
    row_bytes = bytes_per_row(kind, dims[-1])
    if row_bytes is None or min(dims) < 1:
        raise _DamagedError(
            f"tensor {name[:60]!r} of shape {list(dims)} is no whole number of {kind} blocks"
        )
    return name, TensorInfo(kind, dims, offset, prod(dims[:-1]) * row_bytes)


def _kind(type_id: int, name: str) -> str:
    try:
        kind = GGMLQuantizationType(type_id).name
    except ValueError:
        kind = str(type_id)
    if kind not in KINDS:
        known = ", ".join(sorted(KINDS))
        raise _DamagedError(
            f"tensor {name[:60]!r} has the unsupported type {kind}; supported: {known}"
        )
    return kind


class _Cursor:
    """Reads forward; every length is compared with what is left before anything is allocated."""

    def __init__(self, data: np.ndarray) -> None:
        self._data = memoryview(data)  # pyright: ignore[reportArgumentType]  (numpy's stubs lag)
        self.at = 0

    def scalar(self, layout: struct.Struct) -> Any:
        (value,) = layout.unpack_from(self._data, self.at)
        self.at += layout.size
        return value

    def take(self, num_bytes: int) -> memoryview:
        if num_bytes > len(self._data) - self.at:
            raise _DamagedError("the file ends inside its header (truncated?)")
        self.at += num_bytes
        return self._data[self.at - num_bytes : self.at]

    def string(self) -> str:
        return str(self.take(self.scalar(_U64)), "utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array(self.scalar(_U32), self.scalar(_U64))
        if kind not in _SCALARS:
            raise _DamagedError(f"unknown metadata type {kind}")
        return self.scalar(_SCALARS[kind])

    def array(self, kind: int, count: int) -> list[Any]:
        if kind == _STRING:
            return [self.string() for _ in range(count)]
        if kind not in _SCALARS:
            raise _DamagedError(f"unknown metadata type {kind} in an array")
        layout = _SCALARS[kind]
        return np.frombuffer(self.take(count * layout.size), layout.format).tolist()
