"""GPTQ and AWQ matrices, by hand and through the quantizer of the tests; whole checkpoints through the loader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from backend.cpu import native
from backend.cpu.packed import pack_affine
from backend.engine.config import EngineConfig
from backend.engine.engine import LLMEngine
from backend.models.errors import ModelLoadError
from backend.models.loader import load_model
from backend.quant.awq import read_awq
from backend.quant.gptq import read_gptq
from tests.backend import tiny_llama
from tests.backend.quantized_folder import awq_parts, gptq_parts, grid, write_quantized
from tests.backend.toy_model import request, run

pytestmark = pytest.mark.usefixtures("one_thread")


IDS = [3, 40, 41, 200, 7, 99]


def random_matrix(rows: int = 48, cols: int = 128, shift: float = 0.0) -> Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(7)) / 16 + shift


def cosine(got: Tensor, wanted: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(got.flatten(), wanted.flatten(), dim=0))


def test_a_gptq_word_holds_successive_inputs_from_its_lowest_bits_up() -> None:
    parts = {
        "qweight": torch.tensor([[0x76543210] * 8]).int(),  # inputs 0..7 have the codes 0..7
        "qzeros": torch.tensor([[0x22222222]]).int(),
        "scales": torch.full((1, 8), 0.5).half(),
    }
    row = [0.5 * (code - 2) for code in range(8)]
    assert read_gptq(parts, sym=False, v2=True).dequantize().tolist() == [row] * 8


def test_version_one_zero_points_are_stored_one_too_low() -> None:
    parts = {
        "qweight": torch.tensor([[0x33333333] * 8]).int(),
        "qzeros": torch.tensor([[0x76543210]]).int(),  # outputs 0..7 have the zero points 1..8
        "scales": torch.ones(1, 8).half(),
    }
    out = read_gptq(parts, sym=False, v2=False).dequantize()
    assert out[:, 0].tolist() == [3 - zero for zero in range(1, 9)]


def test_an_awq_word_holds_even_outputs_then_odd_ones() -> None:
    parts = {
        "qweight": torch.tensor([[0x75316420]] * 8).int(),  # outputs 0..7 have the codes 0..7
        "qzeros": torch.tensor([[0x11111111]]).int(),
        "scales": torch.full((1, 8), 0.5).half(),
    }
    out = read_awq(parts).dequantize()
    assert out[:, 0].tolist() == [0.5 * (code - 1) for code in range(8)]


GPTQ = [(bits, size, sym) for bits in (4, 8) for size in (32, 64, 128, -1) for sym in (False, True)]


@pytest.mark.parametrize("v2", [False, True], ids=["v1", "v2"])
@pytest.mark.parametrize(("bits", "group_size", "sym"), GPTQ)
def test_a_gptq_matrix_is_read_exactly(bits: int, group_size: int, sym: bool, v2: bool) -> None:
    weight = random_matrix()
    made = grid(weight, bits=bits, group_size=group_size, sym=sym)
    packed = pack_affine(read_gptq(gptq_parts(made, bits=bits, v2=v2), sym=sym, v2=v2))
    torch.testing.assert_close(packed.dequantize(), made.dense(), rtol=1e-6, atol=1e-7)
    assert cosine(packed.dequantize(), weight) > (0.98 if bits == 4 else 0.9999)


@pytest.mark.parametrize("shift", [1.0, -1.0], ids=["zero point 0", "zero point 15"])
@pytest.mark.parametrize("v2", [False, True], ids=["v1", "v2"])
def test_the_outermost_zero_points_are_read_exactly(shift: float, v2: bool) -> None:
    """All weights on one side of zero. In v1 a zero point of 0 borrows from the next field of its word."""
    weight = torch.cat((random_matrix(24, shift=shift), random_matrix(24)))
    weight = weight[torch.randperm(48, generator=torch.Generator().manual_seed(1))]
    made = grid(weight)
    assert (made.zeros == (0 if shift > 0 else 15)).any()
    got = read_gptq(gptq_parts(made, v2=v2), sym=False, v2=v2).dequantize()
    torch.testing.assert_close(got, made.dense(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("stored", [0, 0x77777777, 0x88888888 - (1 << 32)])
def test_the_stored_zero_points_of_a_symmetric_matrix_do_not_matter(stored: int) -> None:
    made = grid(random_matrix(), sym=True)
    parts = gptq_parts(made)
    parts["qzeros"] = torch.full_like(parts["qzeros"], stored)
    got = read_gptq(parts, sym=True, v2=False).dequantize()
    torch.testing.assert_close(got, made.dense(), rtol=1e-6, atol=1e-7)


def test_version_two_read_as_version_one_would_be_wrong() -> None:
    made = grid(random_matrix())
    got = read_gptq(gptq_parts(made, v2=True), sym=False, v2=False).dequantize()
    assert cosine(got, made.dense()) < 0.98


def test_a_g_idx_in_runs_changes_nothing() -> None:
    made = grid(random_matrix())
    plain, indexed = (
        read_gptq(gptq_parts(made, desc_act=desc_act), sym=False, v2=False)
        for desc_act in (False, True)
    )
    assert torch.equal(plain.codes, indexed.codes)


def test_inputs_in_act_order_keep_the_scales_of_their_groups() -> None:
    order = torch.randperm(128, generator=torch.Generator().manual_seed(2))
    made = grid(random_matrix(), order=order)
    packed = pack_affine(read_gptq(gptq_parts(made, desc_act=True), sym=False, v2=False))
    assert packed.kind == "Q8_0"
    assert cosine(packed.dequantize(), made.dense()) > 0.9999


@pytest.mark.parametrize("group_size", [32, 128, -1])
@pytest.mark.parametrize("shift", [0.0, 1.0, -1.0])
def test_an_awq_matrix_is_read_exactly(group_size: int, shift: float) -> None:
    made = grid(random_matrix(shift=shift), group_size=group_size)
    packed = pack_affine(read_awq(awq_parts(made)))
    torch.testing.assert_close(packed.dequantize(), made.dense(), rtol=1e-6, atol=1e-6)


def test_symmetric_four_bit_matrices_take_the_smallest_blocks() -> None:
    made = grid(random_matrix(), sym=True)
    assert pack_affine(read_gptq(gptq_parts(made), sym=True, v2=False)).kind == "Q4_0"
    assert (
        pack_affine(read_gptq(gptq_parts(grid(random_matrix())), sym=False, v2=False)).kind == "W4"
    )


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"qzeros": torch.zeros(4, 4).int()}, "GPTQ in 2 bits is not supported"),
        ({"scales": torch.ones(3, 48).half()}, "3 groups do not share 128 inputs evenly"),
        ({"g_idx": torch.full((128,), 4).int()}, "g_idx does not give a group below 4"),
        ({"qweight": torch.zeros(16, 40).int()}, "qweight has 40 outputs, scales have 48"),
    ],
)
def test_parts_that_do_not_fit_are_refused(change: dict[str, Tensor], says: str) -> None:
    parts = gptq_parts(grid(random_matrix())) | change
    with pytest.raises(ValueError, match=says):
        read_gptq(parts, sym=False, v2=False)


SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gptq": ({"quant_method": "gptq", "bits": 4, "sym": False}, {}),
    "gptq v2": (
        {"quant_method": "gptq", "bits": 4, "sym": False, "checkpoint_format": "gptq_v2"},
        {"group_size": -1},
    ),
    "gptq sym": ({"quant_method": "gptq", "bits": 4, "sym": True}, {"sym": True}),
    "gptq 8": ({"quant_method": "gptq", "bits": 8, "sym": False}, {"bits": 8}),
    "gptq act": ({"quant_method": "gptq", "bits": 4, "desc_act": True}, {}),
    "awq": ({"quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": True}, {}),
}


def logits(folder: Path, **options: Any) -> Tensor:
    model = load_model(folder, dtype="float32", **options).model
    return tiny_llama.step(model, model.new_kv_cache(4, 16), [IDS], [len(IDS)], [[0]])[0]


@pytest.mark.parametrize("tier", ["portable", "native"])
@pytest.mark.parametrize("name", SETTINGS)
def test_a_quantized_folder_answers_like_its_dense_weights(
    name: str, tier: str, tmp_path: Path
) -> None:
    if tier == "native" and (reason := native.native_available()):
        pytest.skip(f"no native tier: {reason}")
    settings, options = SETTINGS[name]
    folder, weights = write_quantized(tmp_path / "model", settings, **options)
    wanted = tiny_llama.dense_logits(weights, IDS)[-1].float()
    assert (logits(folder, native=tier == "native") - wanted).abs().max() < 1e-4


def test_settings_in_a_file_of_their_own_are_found(tmp_path: Path) -> None:
    folder, weights = write_quantized(tmp_path / "model", SETTINGS["gptq"][0])
    config = json.loads((folder / "config.json").read_text())
    settings = config.pop("quantization_config")
    del settings["quant_method"]
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "quantize_config.json").write_text(json.dumps(settings))
    (folder / "model.safetensors").rename(folder / "gptq_model-4bit-32g.safetensors")
    wanted = tiny_llama.dense_logits(weights, IDS)[-1].float()
    assert (logits(folder, native=False) - wanted).abs().max() < 1e-4


def test_quantized_tensors_without_settings_are_refused(tmp_path: Path) -> None:
    folder, _ = write_quantized(tmp_path / "model", SETTINGS["gptq"][0])
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match="no quantization_config in"):
        load_model(folder)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            {"quant_method": "compressed-tensors"},
            "quant_method 'compressed-tensors' is not supported",
        ),
        ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes' is not supported"),
        ({"quant_method": "fp8"}, "quant_method 'fp8' is not supported; supported: gptq, awq"),
        ({"quant_method": "gptq", "bits": 3}, "bits 3 is not supported; supported: 4, 8"),
        (
            {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"},
            "checkpoint_format 'marlin' is not supported; supported: gptq, gptq_v2",
        ),
        (
            {"quant_method": "gptq", "bits": 4, "is_marlin_format": True},
            "'marlin' is not supported",
        ),
        (
            {"quant_method": "gptq", "bits": 4, "dynamic": {"x": {"sym": False}}},
            "dynamic rules that set sym are not supported",
        ),
        ({"quant_method": "awq", "bits": 8}, "bits 8 is not supported; supported: 4"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version 'gemv' is not supported"),
        (
            {"quant_method": "awq", "bits": 4, "zero_point": False},
            "zero_point False is not supported",
        ),
    ],
)
def test_a_format_that_we_cannot_read_is_named(
    settings: dict[str, Any], says: str, tmp_path: Path
) -> None:
    folder = tiny_llama.write_folder(tmp_path, tiny_llama.tensors(), quantization_config=settings)
    with pytest.raises(ModelLoadError) as caught:
        load_model(folder)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_quantized_folder_is_not_quantized_again(tmp_path: Path) -> None:
    folder, _ = write_quantized(tmp_path / "model", SETTINGS["gptq"][0])
    with pytest.raises(
        ModelLoadError, match="already quantized; quantization must be auto or none"
    ):
        load_model(folder, quantization="w8")


def test_a_quantized_folder_can_be_widened(tmp_path: Path) -> None:
    folder, weights = write_quantized(tmp_path / "model", SETTINGS["gptq"][0])
    wanted = tiny_llama.dense_logits(weights, IDS)[-1].float()
    assert (logits(folder, quantization="none", native=False) - wanted).abs().max() < 1e-4


@pytest.mark.parametrize("method", ["gptq", "awq"])
@pytest.mark.parametrize(
    ("part", "tensor", "says"),
    [
        ("scales", torch.ones(96).half(), "scales is [96], expected rows and columns"),
        ("scales", torch.ones(0, 96).half(), "scales is [0, 96], expected rows and columns"),
        ("scales", torch.ones(2, 96).int(), "scales is stored as torch.int32"),
        ("qweight", torch.ones(64, 96).half(), "qweight is stored as torch.float16"),
        ("qzeros", torch.ones(2, 12).long(), "qzeros is stored as torch.int64"),
        ("qzeros", torch.ones(3, 96).int(), ""),
        ("qweight", torch.ones(5, 7).int(), ""),
    ],
)
def test_a_part_of_another_form_names_its_tensor(
    method: str, part: str, tensor: Tensor, says: str, tmp_path: Path
) -> None:
    folder, _ = write_quantized(tmp_path / "model", SETTINGS[method][0])
    path = folder / "model.safetensors"
    stored = load_file(path) | {f"model.layers.1.mlp.gate_proj.{part}": tensor}
    save_file(stored, path)
    with pytest.raises(ModelLoadError) as caught:
        load_model(folder)
    message = str(caught.value)
    assert says in message
    assert "model.layers.1.mlp.gate_proj" in message
    assert "\n" not in message


def test_a_damaged_part_names_its_tensor(tmp_path: Path) -> None:
    folder, _ = write_quantized(tmp_path / "model", SETTINGS["gptq"][0])
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b"down_proj.scales", b"down_proj.scalez"))
    with pytest.raises(
        ModelLoadError, match=r"tensor model.layers.0.mlp.down_proj.scales is missing"
    ):
        load_model(folder)


@pytest.mark.parametrize("name", SETTINGS)
def test_the_engine_writes_the_same_text_from_a_quantized_folder_as_from_its_dense_weights(
    name: str, tmp_path: Path
) -> None:
    settings, options = SETTINGS[name]
    folder, weights = write_quantized(tmp_path / "model", settings, **options)
    written = []
    for each in (folder, tiny_llama.write_folder(tmp_path / "dense", weights)):
        loaded = load_model(each, dtype="float32", threads=1)
        engine = LLMEngine(loaded.model, loaded.tokenizer, EngineConfig(num_blocks=16))
        prompts = [request(str(i), IDS[i:], max_tokens=8, ignore_eos=True) for i in range(3)]
        outputs = run(engine, *prompts)
        written.append([outputs[str(i)].token_ids for i in range(3)])
    assert written[0] == written[1]
    assert [len(ids) for ids in written[0]] == [8, 8, 8]
