"""GGUF's block formats as groups of codes, against the dequantizer of the `gguf` package."""

from __future__ import annotations

import gguf
import pytest
import torch

from backend.cpu.packed import pack_affine
from tests.backend.native_weights import GGUF_BLOCKS, random_blocks


@pytest.mark.parametrize("kind", GGUF_BLOCKS)
def test_groups_of_codes_equal_the_formula_of_the_format(kind: str) -> None:
    weight = random_blocks(kind)
    wanted = torch.from_numpy(gguf.quants.dequantize(weight.raw, gguf.GGMLQuantizationType[kind]))
    torch.testing.assert_close(weight.affine().dequantize(), wanted, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(weight.dequantize(), wanted, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("kind", "packed_as"),
    [
        ("Q4_0", "Q4_0"),
        ("Q4_1", "Q4_1"),
        ("Q8_0", "Q8_0"),
        ("Q5_0", "Q8_0"),
        ("IQ4_NL", "Q8_0"),
        ("Q4_K", "W4"),
        *((kind, "W8") for kind in ("Q5_1", "Q2_K", "Q3_K", "Q5_K", "Q6_K", "IQ4_XS")),
    ],
)
def test_each_format_has_blocks_of_ours_that_hold_it_exactly(kind: str, packed_as: str) -> None:
    groups = random_blocks(kind).affine()
    packed = pack_affine(groups)
    assert packed.kind == packed_as
    assert torch.equal(packed.dequantize(), groups.dequantize())
