from __future__ import annotations

import random
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from backend.cpu.packed import PackedWeight, pack
from backend.models.checkpoint import checkpoint_fingerprint
from backend.models.errors import ModelLoadError
from backend.models.gguf import GGUFFile
from backend.models.gguf_checkpoint import GGUFCheckpoint
from tests.backend import tiny_llama


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama.write_gguf(
        tmp_path_factory.mktemp("gguf") / "tiny.gguf", tiny_llama.tensors()
    )


def test_metadata_reads_as_it_was_written(tiny: Path) -> None:
    metadata = GGUFFile(tiny).metadata
    assert metadata["llama.attention.head_count"] == 6
    assert metadata["llama.rope.freq_base"] == 10000.0
    assert metadata["tokenizer.ggml.tokens"] == tiny_llama.TOKENS
    assert metadata["tokenizer.ggml.token_type"][:4] == [3, 3, 3, 1]


def test_a_tensor_is_the_mapped_bytes_in_torch_order(tiny: Path) -> None:
    stored = GGUFFile(tiny).tensor("blk.1.ffn_down.weight")
    wanted = tiny_llama.tensors()["model.layers.1.mlp.down_proj.weight"]
    assert stored.shape == (64, 96)
    assert torch.equal(stored.dequantize(), wanted)


@pytest.mark.parametrize(("hf", "heads"), [("q_proj", 6), ("k_proj", 2)])
def test_interleaved_q_and_k_rows_come_back_in_rotate_half_order(
    tiny: Path, hf: str, heads: int
) -> None:
    name = f"model.layers.0.self_attn.{hf}.weight"
    wanted = tiny_llama.tensors()[name]
    assert torch.equal(GGUFCheckpoint(GGUFFile(tiny)).weight(name).dequantize(), wanted)
    stored = GGUFFile(tiny).tensor(f"blk.0.attn_{hf[0]}.weight").dequantize()
    assert torch.equal(stored, tiny_llama.interleaved(wanted, heads))


def test_packed_rows_are_put_in_order_without_touching_their_blocks(tmp_path: Path) -> None:
    weights = tiny_llama.tensors()
    path = tiny_llama.write_gguf(tmp_path / "q.gguf", weights, kind="Q4_1")
    packed = GGUFCheckpoint(GGUFFile(path)).weight("model.layers.0.self_attn.q_proj.weight")
    assert packed.kind == "Q4_1"
    assert packed.raw.shape == (96, 2 * 20)
    wanted = gguf.quants.quantize(
        weights["model.layers.0.self_attn.q_proj.weight"].numpy(), gguf.GGMLQuantizationType.Q4_1
    )
    assert np.array_equal(packed.raw, wanted)


def half(value: float) -> bytes:
    return struct.pack("<e", value)


def nibbles(codes: list[int]) -> bytes:
    """ggml's order: byte i holds value i in its low half and value i + 16 in its high half."""
    return bytes(codes[i] | codes[i + 16] << 4 for i in range(16))


CODES = [(7 * i + 3) % 16 for i in range(32)]
FIVE_BIT = [(11 * i + 5) % 32 for i in range(32)]
HIGH_BITS = struct.pack("<I", sum((code >> 4) << i for i, code in enumerate(FIVE_BIT)))
LOW = nibbles([code & 15 for code in FIVE_BIT])
BLOCKS = {
    "Q4_0": (half(0.5) + nibbles(CODES), [0.5 * (c - 8) for c in CODES]),
    "Q4_1": (half(0.5) + half(-3) + nibbles(CODES), [0.5 * c - 3 for c in CODES]),
    "Q5_0": (half(0.25) + HIGH_BITS + LOW, [0.25 * (c - 16) for c in FIVE_BIT]),
    "Q5_1": (half(0.25) + half(1) + HIGH_BITS + LOW, [0.25 * c + 1 for c in FIVE_BIT]),
    "Q8_0": (
        half(0.125) + struct.pack("<32b", *range(-16, 16)),
        [0.125 * c for c in range(-16, 16)],
    ),
    "F16": (b"".join(half(i / 4) for i in range(32)), [i / 4 for i in range(32)]),
    "BF16": (
        b"".join(struct.pack("<f", i / 4)[2:] for i in range(32)),
        [i / 4 for i in range(32)],
    ),
}


@pytest.mark.parametrize("kind", BLOCKS)
def test_a_block_dequantizes_by_its_formula(kind: str) -> None:
    raw, wanted = BLOCKS[kind]
    rows = np.frombuffer(raw * 3, np.uint8).reshape(3, -1)
    assert PackedWeight(kind, rows, (3, 32)).dequantize().tolist() == [wanted] * 3


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K"])
def test_k_quants_dequantize_in_rows_of_256(kind: str) -> None:
    block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]
    raw: NDArray[np.uint8] = np.zeros((2, block_bytes), np.uint8)
    assert PackedWeight(kind, raw, (2, 256)).dequantize().shape == (2, 256)


def test_slices_of_a_large_matrix_dequantize_like_the_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = torch.randn(50, 64, generator=torch.Generator().manual_seed(0)).numpy()
    raw = gguf.quants.quantize(data, gguf.GGMLQuantizationType.Q8_0)
    weight = PackedWeight("Q8_0", raw, (50, 64))
    whole = weight.dequantize()
    monkeypatch.setattr("backend.cpu.packed._CHUNK_BYTES", 700)
    assert torch.equal(weight.dequantize(), whole)


def test_a_torch_tensor_is_packed_without_a_copy() -> None:
    tensor = torch.randn(4, 8).bfloat16()
    packed = pack(tensor)
    assert torch.equal(packed.dequantize(), tensor.float())
    assert packed.raw.ctypes.data == tensor.data_ptr()


@pytest.mark.parametrize("at", [0, -1], ids=["first", "last"])
def test_the_fingerprint_changes_with_either_end_of_a_tensor(
    tmp_path: Path, tiny: Path, at: int
) -> None:
    weights = tiny_llama.tensors()
    weights["model.layers.1.mlp.up_proj.weight"][at, at] += 1
    other = tiny_llama.write_gguf(tmp_path / "other.gguf", weights)
    first, second = (checkpoint_fingerprint(GGUFCheckpoint(GGUFFile(p))) for p in (tiny, other))
    assert first != second
    assert first == checkpoint_fingerprint(GGUFCheckpoint(GGUFFile(tiny)))


def fault(path: Path) -> str:
    with pytest.raises(ModelLoadError) as caught:
        GGUFCheckpoint(GGUFFile(path))
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    return message


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert "no such file" in fault(tmp_path / "absent.gguf")


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.gguf").touch()
    assert "empty" in fault(tmp_path / "empty.gguf")


def test_a_folder_is_refused(tmp_path: Path) -> None:
    assert "cannot be read" in fault(tmp_path)


@pytest.mark.parametrize(
    ("start", "says"),
    [
        (b"PK\x03\x04" + bytes(60), "not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "version"),  # big-endian
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 62), "ends inside its header"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 62, 0), "ends inside its header"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 62), "ends inside its header"),
        (
            b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 8, 1 << 60),
            "ends inside its header",
        ),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"k", 77), "unknown metadata type 77"),
    ],
)
def test_a_header_that_promises_too_much_is_refused(
    tmp_path: Path, start: bytes, says: str
) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(start)
    assert says in fault(path)


def test_a_file_cut_anywhere_is_refused(tmp_path: Path, tiny: Path) -> None:
    whole = tiny.read_bytes()
    path = tmp_path / "cut.gguf"
    for size in [*range(1, 400, 7), *range(400, len(whole) - 1, 9973), len(whole) - 1]:
        path.write_bytes(whole[:size])
        fault(path)


def test_a_cut_in_the_tensors_names_the_tensor(tmp_path: Path, tiny: Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(tiny.read_bytes()[:-1000])
    assert "truncated: tensor" in fault(path)


def test_flipped_bytes_never_end_in_anything_but_a_load_error(tmp_path: Path, tiny: Path) -> None:
    whole, rng = tiny.read_bytes(), random.Random(4)
    path = tmp_path / "flipped.gguf"
    refused = 0
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(4, 6000)] = rng.randrange(256)
        path.write_bytes(data)
        try:
            GGUFCheckpoint(GGUFFile(path))
        except ModelLoadError:
            refused += 1
    assert refused > 20


def test_an_unknown_tensor_type_is_named(tmp_path: Path, tiny: Path) -> None:
    data = tiny.read_bytes()
    name = b"output_norm.weight"
    at = data.index(name) + len(name) + 4 + 8  # its type follows its one dimension
    path = tmp_path / "odd.gguf"
    path.write_bytes(data[:at] + struct.pack("<I", 34) + data[at + 4 :])
    assert "unsupported type TQ1_0" in fault(path)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("general__architecture", "mamba", "architecture 'mamba' is not supported"),
        ("llama__block_count", None, "block_count is missing"),
        ("llama__attention__head_count", "six", "head_count has the unexpected value 'six'"),
        ("llama__attention__head_count_kv", 4, "6 heads cannot share 4 KV heads"),
        ("llama__context_length", 0, "context length is 0"),
        ("llama__expert_count", 8, "expert_used_count is missing"),
        ("llama__rope__dimension_count", 8, "partial rotary"),
        ("llama__rope__scaling__type", "longrope", "rope scaling 'longrope'"),
    ],
)
def test_a_shape_that_cannot_run_is_named(
    tmp_path: Path, key: str, value: object, says: str
) -> None:
    path = tiny_llama.write_gguf(tmp_path / "odd.gguf", tiny_llama.tensors(), **{key: value})
    assert says in fault(path)
