"""The weight formats: what a quantizer may lose, and that blocks hold it exactly."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from backend.cpu.packed import pack_affine
from backend.quant.affine import AffineWeight, stacked
from backend.quant.blocks import pack_blocks, smallest_kind, unpack_blocks
from backend.quant.w4 import quantize_w4
from backend.quant.w8 import quantize_w8
from backend.quant.weights import is_quantized, quantize_weight

pytestmark = pytest.mark.usefixtures("one_thread")


def random_matrix(rows: int = 12, cols: int = 256, seed: int = 0) -> Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)) / 16


def relative_error(got: Tensor, wanted: Tensor) -> float:
    return float((got - wanted).norm() / wanted.norm())


def test_w8_is_off_by_at_most_half_a_step_of_its_row() -> None:
    weight = random_matrix()
    step = weight.abs().amax(1, keepdim=True) / 127
    assert ((quantize_w8(weight).dequantize() - weight).abs() <= step * 0.501).all()


def test_w8_keeps_the_sign_and_size_of_a_rows_largest_weight() -> None:
    weight = torch.tensor([[0.5, -1.0] + [0.0] * 14, [127.0, 1.0] + [0.0] * 14])
    assert quantize_w8(weight).codes[:, :2].tolist() == [[64, -127], [127, 1]]


def test_a_row_of_zeros_stays_zero_in_every_format() -> None:
    weight = torch.zeros(2, 64)
    for to in ("w8", "w4"):
        assert quantize_weight(weight, to).dequantize().tolist() == weight.tolist()


@pytest.mark.parametrize(("group_size", "limit"), [(32, 0.08), (64, 0.09), (128, 0.1)])
def test_w4_of_gaussian_weights_loses_less_than_a_tenth(group_size: int, limit: float) -> None:
    weight = random_matrix(64)
    assert relative_error(quantize_w4(weight, group_size).dequantize(), weight) < limit


def test_w4_gives_back_weights_that_lie_on_a_grid_of_sixteen_levels() -> None:
    codes = torch.randint(0, 16, (8, 4, 32), generator=torch.Generator().manual_seed(1))
    codes[..., 0], codes[..., 1] = 0, 15
    weight = (codes * 0.25 - 1.5).view(8, 128)
    assert torch.equal(quantize_w4(weight, 32).dequantize(), weight)


def test_a_constant_group_of_w4_keeps_its_value() -> None:
    assert torch.equal(quantize_w4(torch.full((2, 32), 0.5)).dequantize(), torch.full((2, 32), 0.5))


def test_importance_moves_the_error_to_columns_that_matter_less() -> None:
    weight, importance = random_matrix(64), torch.ones(256)
    importance[::4] = 100.0
    plain, aware = (
        (quantize_w4(weight, 32, counts).dequantize() - weight)[:, ::4].norm()
        for counts in (None, importance)
    )
    assert aware < 0.95 * plain


def test_quantizing_in_slices_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random_matrix(40)
    whole = quantize_w4(weight)
    monkeypatch.setattr("backend.quant.w4._CHUNK_ELEMENTS", 3 * 256)
    assert torch.equal(quantize_w4(weight).codes, whole.codes)


def affine(low: int, high: int, group_size: int, scale: Tensor, offset: Tensor) -> AffineWeight:
    generator = torch.Generator().manual_seed(5)
    codes = torch.randint(low, high + 1, (3, 64), generator=generator).to(torch.int8)
    codes[0, :2] = torch.tensor([low, high])
    return AffineWeight(
        codes, scale.expand(3, 64 // group_size), offset.expand(3, 64 // group_size)
    )


HALF, THIRD, NONE = torch.tensor(0.25), torch.tensor(1 / 3), torch.tensor(0.0)
CASES = {
    "Q8_0": affine(-127, 127, 64, HALF, NONE),
    "Q4_0": affine(0, 15, 32, HALF, -8 * HALF),
    "Q4_1": affine(0, 15, 64, HALF, torch.tensor(-3.0)),
    "W4": affine(0, 15, 32, HALF, THIRD),
    "W8": affine(-128, 127, 32, THIRD, HALF),
}


@pytest.mark.parametrize("kind", CASES)
def test_the_smallest_blocks_that_hold_a_weight_give_it_back_exactly(kind: str) -> None:
    weight = CASES[kind]
    packed = pack_affine(weight)
    assert packed.kind == kind
    assert torch.equal(packed.dequantize(), weight.dequantize())


@pytest.mark.parametrize("kind", CASES)
def test_blocks_unpack_to_the_codes_that_were_packed(kind: str) -> None:
    weight = CASES[kind]
    again = unpack_blocks(kind, pack_blocks(weight, kind))
    assert torch.equal(again.codes, weight.codes)
    assert torch.equal(again.dequantize(), weight.dequantize())


def test_groups_of_sixteen_columns_fit_w8_blocks() -> None:
    weight = affine(0, 3, 16, HALF, NONE)
    assert smallest_kind(weight) == "W8"
    assert torch.equal(pack_affine(weight).dequantize(), weight.dequantize())


def test_a_width_that_is_no_whole_number_of_blocks_cannot_be_packed() -> None:
    weight = AffineWeight(torch.zeros(2, 24, dtype=torch.int8), torch.ones(2, 1), torch.ones(2, 1))
    with pytest.raises(ValueError, match="24 columns in groups of 24 make no W8 blocks"):
        pack_affine(weight)


def test_stacked_weights_take_the_smallest_of_their_groups() -> None:
    both = stacked([CASES["Q8_0"], CASES["W4"]])
    assert both.group_size == 32
    wanted = torch.cat([CASES["Q8_0"].dequantize(), CASES["W4"].dequantize()])
    assert torch.equal(both.dequantize(), wanted)


def test_rows_far_smaller_than_the_others_keep_the_small_blocks() -> None:
    weight = random_matrix()
    weight[3] *= 1e-4
    packed = quantize_weight(weight, "w8")
    assert packed.kind == "Q8_0"
    assert relative_error(packed.dequantize()[3], weight[3]) < 0.05


def test_a_matrix_that_is_tiny_as_a_whole_is_kept_in_float32() -> None:
    weight = random_matrix() * 1e-6
    packed = quantize_weight(weight, "w8")
    assert packed.kind == "W8"
    assert relative_error(packed.dequantize(), weight) < 0.01


def test_a_scale_beyond_float16_is_kept_in_float32() -> None:
    weight = random_matrix() * 1e8
    packed = quantize_weight(weight, "w4")
    assert packed.kind == "W4"
    assert relative_error(packed.dequantize(), weight) < 0.08


@pytest.mark.parametrize(
    ("to", "shape", "says"),
    [
        ("w4", (4, 48), "w4 needs a width that is a multiple of 32, got 48"),
        ("w8", (4, 40), "w8 needs a width that is a multiple of 32, got 40"),
    ],
)
def test_a_width_that_a_format_cannot_hold_is_refused(
    to: str, shape: tuple[int, int], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        quantize_weight(torch.zeros(shape), to)


def test_a_weight_that_is_no_number_is_refused() -> None:
    weight = torch.zeros(2, 32)
    weight[1, 3] = float("nan")
    with pytest.raises(ValueError, match="infinite or no number"):
        quantize_weight(weight, "w4")


@pytest.mark.parametrize(
    ("name", "taken"),
    [
        ("model.layers.0.self_attn.q_proj.weight", True),
        ("model.layers.11.mlp.gate_proj.weight", True),
        ("model.layers.3.mlp.experts.7.down_proj.weight", True),
        ("model.layers.3.block_sparse_moe.experts.7.w2.weight", True),
        ("model.layers.3.block_sparse_moe.gate.weight", False),
        ("model.layers.3.mlp.gate.weight", False),
        ("model.layers.0.self_attn.q_proj.bias", False),
        ("model.layers.0.input_layernorm.weight", False),
        ("model.embed_tokens.weight", False),
        ("lm_head.weight", False),
    ],
)
def test_the_projections_of_layers_are_quantized_and_nothing_else(name: str, taken: bool) -> None:
    assert is_quantized(name) is taken
