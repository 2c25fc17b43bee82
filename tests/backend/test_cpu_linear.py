from __future__ import annotations

import pytest
import torch

from backend.cpu import linear
from backend.cpu.linear import (
    W4_MAX_ROWS,
    DenseLinear,
    FewRowsLinear,
    Int4Linear,
    WidenedLinear,
    make_linear,
)
from backend.cpu.packed import pack
from backend.quant.w4 import quantize_w4
from backend.quant.weights import quantize_weight

ROWS = [1, 2, 4, 5, 33]


def random_weights(rows: int = 48, cols: int = 64) -> torch.Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(2))


def inputs(rows: int, cols: int = 64) -> torch.Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(rows))


@pytest.mark.parametrize("rows", ROWS)
def test_float32_products_are_exact(rows: int) -> None:
    weight, x = random_weights(), inputs(rows)
    assert torch.allclose(make_linear([pack(weight)], torch.float32)(x), x @ weight.T, atol=1e-5)


@pytest.mark.parametrize("rows", ROWS)
def test_bfloat16_products_are_near(rows: int) -> None:
    weight, x = random_weights(), inputs(rows).bfloat16()
    out = make_linear([pack(weight)], torch.bfloat16)(x)
    assert out.dtype == torch.bfloat16
    assert torch.allclose(out.float(), x.float() @ weight.T, atol=0.2, rtol=0.02)


def test_stacked_weights_answer_side_by_side() -> None:
    first, second, x = random_weights(), random_weights(16) + 1, inputs(3)
    out = make_linear([pack(first), pack(second)], torch.float32)(x)
    assert torch.allclose(out, torch.cat((x @ first.T, x @ second.T), -1), atol=1e-5)


def test_without_the_private_operators_products_are_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight, x = random_weights(), inputs(5)
    prepacked = DenseLinear(weight)(x)
    monkeypatch.setattr(linear, "has_prepacked_linear", lambda dtype: False)
    assert torch.allclose(DenseLinear(weight)(x), prepacked, atol=1e-5)


def test_four_bit_weights_reproduce_sixteen_even_levels() -> None:
    """Values that lie on a group's own grid lose nothing but the rounding of scale and offset to bfloat16."""
    codes = torch.randint(0, 16, (48, 2, 32), generator=torch.Generator().manual_seed(3))
    codes[..., 0], codes[..., 1] = 0, 15
    weight = (codes * 0.25 - 1.5).view(48, 64)
    x = inputs(1).bfloat16()
    assert torch.allclose(
        Int4Linear(quantize_w4(weight))(x).float(), x.float() @ weight.T, atol=0.1, rtol=0.01
    )


def test_a_constant_group_of_four_bit_weights_keeps_its_value() -> None:
    weight = torch.full((48, 64), 0.5)
    x = torch.ones(1, 64, dtype=torch.bfloat16)
    assert torch.allclose(
        Int4Linear(quantize_w4(weight))(x).float(), torch.full((1, 48), 32.0), rtol=0.01
    )


def test_four_bit_weights_serve_few_rows_and_dense_ones_the_rest() -> None:
    both = make_linear([quantize_weight(random_weights(), "w4")], torch.bfloat16)
    assert isinstance(both, FewRowsLinear)
    few, many = inputs(W4_MAX_ROWS).bfloat16(), inputs(W4_MAX_ROWS + 1).bfloat16()
    assert torch.equal(both(few), both._narrow(few))
    assert torch.equal(both(many), both._wide(many))


@pytest.mark.parametrize(("rows", "to"), [(41, "w4"), (48, "w8")], ids=["height", "codes"])
def test_what_the_four_bit_kernel_cannot_take_stays_dense(rows: int, to: str) -> None:
    product = make_linear([quantize_weight(random_weights(rows), to)], torch.bfloat16)
    assert not isinstance(product, FewRowsLinear)


@pytest.mark.parametrize("to", ["w8", "w4"])
def test_float32_products_are_those_of_the_quantized_values(to: str) -> None:
    weight, x = quantize_weight(random_weights(), to), inputs(3)
    assert torch.allclose(
        make_linear([weight], torch.float32)(x), x @ weight.dequantize().T, atol=1e-5
    )


def test_where_bfloat16_products_are_emulated_float32_ones_stand_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(linear, "has_prepacked_linear", lambda dtype: dtype == torch.float32)
    weight, x = random_weights(), inputs(5).bfloat16()
    product = make_linear([pack(weight)], torch.bfloat16)
    assert isinstance(product, WidenedLinear)
    assert torch.equal(product(x), DenseLinear(weight)(x.float()).bfloat16())
