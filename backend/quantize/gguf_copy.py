"""A GGUF file again with some of its tensors in other blocks; settings, tokenizer and template byte for byte."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

from gguf import GGMLQuantizationType

from backend.cpu.packed import PackedWeight
from backend.models.gguf import GGUFFile

_VERSION = 3
_HEAD = struct.Struct("<4sIQQ")


def copy_gguf(
    source: GGUFFile, target: Path, convert: Callable[[str, PackedWeight], PackedWeight]
) -> None:
    """`convert(stored name, weight)` may change the blocks of a tensor to another kind of GGUF's, never its shape."""
    with target.open("wb") as out:
        out.write(_HEAD.pack(b"GGUF", _VERSION, len(source.tensors), source.num_keys))
        out.write(source.metadata_bytes.tobytes())
        heads_at = out.tell()
        # Heads come first in the file but name the blocks, which are chosen on the way; their length is known.
        heads = [_head(name, info.dims, info.kind, 0) for name, info in source.tensors.items()]
        out.write(bytes(sum(map(len, heads))))
        heads.clear()
        data_at = _align(out.tell(), source.alignment)
        for name, info in source.tensors.items():
            at = _align(out.tell(), source.alignment)
            out.write(bytes(at - out.tell()))
            weight = convert(name, source.tensor(name))
            heads.append(_head(name, info.dims, weight.kind, at - data_at))
            out.write(weight.raw.data if weight.raw.flags.c_contiguous else weight.raw.tobytes())
        out.write(bytes(_align(out.tell(), source.alignment) - out.tell()))
        out.seek(heads_at)
        out.write(b"".join(heads))


def _head(name: str, dims: tuple[int, ...], kind: str, offset: int) -> bytes:
    text = name.encode()
    sizes = struct.pack(f"<{len(dims)}Q", *reversed(dims))  # the file lists the innermost first
    type_id = GGMLQuantizationType[kind].value
    return b"".join(
        (
            struct.pack("<Q", len(text)),
            text,
            struct.pack("<I", len(dims)),
            sizes,
            struct.pack("<IQ", type_id, offset),
        )
    )


def _align(at: int, alignment: int) -> int:
    return -(-at // alignment) * alignment
