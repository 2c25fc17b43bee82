"""The native CPU tier's products against torch, and how its library is built."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from backend.cpu import native
from backend.cpu.activations import ROUNDED_FOR, rounded_to_bytes
from backend.cpu.native import NativeUnavailableError
from backend.cpu.native_matrix import KINDS, native_linear, pack_matrix
from backend.cpu.packed import PackedWeight
from tests.backend.native_weights import (
    GGUF_BLOCKS,
    extreme_weight,
    random_blocks,
    random_rows,
    random_weight,
)


@pytest.fixture(scope="module", autouse=True)
def _needs_the_native_tier():
    if reason := native.native_available():
        pytest.skip(f"no native tier: {reason}")


@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 16, 33, 250])
@pytest.mark.parametrize("kind", KINDS)
def test_a_product_equals_torch_on_the_dequantized_weight(kind: str, num_rows: int):
    weight = random_weight(kind, 70, 96)
    x = random_rows(num_rows, 96)
    expected = x.double() @ weight.dequantize().double().T
    got = native_linear(x, pack_matrix([weight]), threads=2)
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_bits_whatever_its_batch_mates(kind: str):
    weight, x = pack_matrix([random_weight(kind, 70, 96)]), random_rows(33, 96)
    alone = torch.cat([native_linear(row, weight) for row in x.split(1)])
    for size in (2, 3, 4, 5, 7, 16, 33):
        assert torch.equal(native_linear(x[:size], weight, threads=2), alone[:size])


@pytest.mark.parametrize("num_rows", [1, 3, 4, 5, 16, 250])
@pytest.mark.parametrize("kind", sorted(ROUNDED_FOR))
def test_a_product_of_bytes_equals_torch_on_rounded_activations(kind: str, num_rows: int):
    weight, x = random_weight(kind, 70, 96), random_rows(num_rows, 96)
    expected = rounded_to_bytes(x).double() @ weight.dequantize().double().T
    got = native_linear(x, pack_matrix([weight]), threads=2, byte_activations=True)
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("kind", sorted(ROUNDED_FOR))
def test_the_integer_sums_of_bytes_are_exact(kind: str):
    """Scales of 1 and the largest codes there are: a sum that saturates or rounds would show."""
    weight = extreme_weight(kind, 48, 64)
    x = torch.where(random_rows(7, 64) < 0, -127.0, 127.0)
    x[0] = 127.0
    got = native_linear(x, pack_matrix([weight]), byte_activations=True)
    assert torch.equal(got.double(), x.double() @ weight.dequantize().double().T)


@pytest.mark.parametrize("kind", sorted(ROUNDED_FOR))
def test_a_rounded_row_has_the_same_bits_whatever_its_batch_mates(kind: str):
    weight, x = pack_matrix([random_weight(kind, 70, 96)]), random_rows(33, 96)
    alone = torch.cat([native_linear(row, weight, byte_activations=True) for row in x.split(1)])
    for size in (2, 3, 4, 5, 7, 16, 33):
        together = native_linear(x[:size], weight, threads=2, byte_activations=True)
        assert torch.equal(together, alone[:size])


def test_float_weights_meet_activations_as_they_are():
    weight, x = pack_matrix([random_weight("F16", 32, 64)]), random_rows(3, 64)
    rounded = native_linear(x, weight, byte_activations=True)
    assert torch.equal(rounded, native_linear(x, weight))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_group_that_is_not_finite_makes_its_row_nan_and_no_other(value: float):
    weight, x = pack_matrix([random_weight("Q4_1", 32, 64)]), random_rows(5, 64)
    x[2, 7] = value
    for out in (native_linear(x, weight, byte_activations=True), rounded_to_bytes(x)):
        assert out.isnan().any(dim=1).tolist() == [False, False, True, False, False]


@pytest.mark.parametrize("kind", GGUF_BLOCKS)
def test_a_product_of_any_gguf_blocks_equals_torch_on_the_dequantized_weight(kind: str):
    weight = random_blocks(kind, 20)
    x = random_rows(2, weight.shape[1])
    expected = x.double() @ weight.dequantize().double().T
    got = native_linear(x, pack_matrix([weight]))
    assert KINDS[pack_matrix([weight]).struct.kind] != "F32"
    torch.testing.assert_close(
        got.double(), expected, rtol=1e-4, atol=1e-6 * expected.abs().max().item()
    )


@pytest.mark.parametrize(("kind", "kept_as"), [("Q5_0", "Q8_0"), ("Q5_1", "W8")])
def test_a_kind_without_a_kernel_is_kept_in_one_that_holds_it(kind: str, kept_as: str):
    weight = random_weight(kind, 32, 64)
    packed = pack_matrix([weight])
    assert KINDS[packed.struct.kind] == kept_as
    x = random_rows(3, 64)
    torch.testing.assert_close(native_linear(x, packed), x @ weight.dequantize().T)


@pytest.mark.parametrize(
    ("kinds", "kept_as"),
    [
        (("Q5_0", "Q8_0"), "Q8_0"),
        (("Q4_1", "W4"), "W4"),
        (("Q8_0", "Q4_1"), "W8"),
        (("Q8_0", "BF16"), "F32"),
        (("F16", "F32"), "F32"),
    ],
)
def test_a_stack_of_mixed_kinds_is_kept_in_one_that_holds_them_all(
    kinds: tuple[str, str], kept_as: str
):
    weights = [random_weight(kind, 16, 64, seed) for seed, kind in enumerate(kinds)]
    packed, x = pack_matrix(weights), random_rows(3, 64)
    assert KINDS[packed.struct.kind] == kept_as
    expected = x @ torch.cat([w.dequantize() for w in weights]).T
    torch.testing.assert_close(native_linear(x, packed), expected)


def test_stacked_matrices_answer_side_by_side_in_the_asked_order():
    first, second = random_weight("Q8_0", 16, 32, seed=2), random_weight("Q8_0", 32, 32, seed=3)
    order = np.arange(48)[::-1].copy()
    x = random_rows(2, 32)
    expected = torch.cat([native_linear(x, pack_matrix([w])) for w in (first, second)], dim=1)
    got = native_linear(x, pack_matrix([first, second], order))
    assert torch.equal(got, expected[:, torch.from_numpy(order)])


def test_extreme_half_scales_survive_packing():
    weight = random_weight("Q8_0", 1, 32)
    raw = weight.raw.copy()
    raw[0, :2] = np.frombuffer(np.float16(6e-8).tobytes(), np.uint8)  # a subnormal scale
    weight = PackedWeight("Q8_0", raw, (1, 32))
    x = random_rows(1, 32)
    expected = x.double() @ weight.dequantize().double().T
    got = native_linear(x, pack_matrix([weight])).double()
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=0)


def test_a_nan_comes_out_where_it_went_in():
    weight, x = pack_matrix([random_weight("Q4_1", 32, 32)]), random_rows(5, 32)
    x[2, 7] = float("nan")
    assert native_linear(x, weight).isnan().any(dim=1).tolist() == [
        False,
        False,
        True,
        False,
        False,
    ]


@pytest.mark.parametrize(
    ("shape", "dtype"), [((2, 31), torch.float32), ((2, 32), torch.float64), ((32,), torch.float32)]
)
def test_a_wrong_input_is_refused_with_its_shape(shape: tuple[int, ...], dtype: torch.dtype):
    with pytest.raises(ValueError, match=r"x must be float32 \[T, 32\]"):
        native_linear(torch.zeros(shape, dtype=dtype), pack_matrix([random_weight("F32", 16, 32)]))


def test_matrices_of_different_widths_are_refused():
    with pytest.raises(ValueError, match="different widths"):
        pack_matrix([random_weight("F32", 16, 32), random_weight("F32", 16, 48)])


def test_without_a_compiler_the_reason_names_what_was_looked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(NativeUnavailableError, match=r"no C\+\+ compiler found"):
        native.build_library(tmp_path / "cache")


def test_a_compiler_that_fails_leaves_no_library_behind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    broken = tmp_path / "c++"
    broken.write_text(
        "#!/bin/sh\n[ $1 = --version ] && exit 0\necho 'x.cpp: error: no vectors here' >&2\nexit 1\n"
    )
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(NativeUnavailableError, match="no vectors here"):
        native.build_library(tmp_path / "cache")
    assert [p.name for p in (tmp_path / "cache").iterdir()] == ["native.lock"]


def test_a_cache_that_others_can_write_is_not_trusted(tmp_path: Path):
    folder = tmp_path / "cache"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(NativeUnavailableError, match="can be written by others"):
        native.build_library(folder)


def test_a_second_build_finds_the_first():
    target = native.build_library(native.cache_dir())
    before = target.stat().st_mtime_ns
    assert native.build_library(native.cache_dir()).stat().st_mtime_ns == before


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(platform.machine() != "x86_64", reason="names processors of one family")
@pytest.mark.parametrize("processor", ["skylake-avx512", "cascadelake", "alderlake"])
def test_it_compiles_for_processors_that_are_not_here(processor: str, tmp_path: Path):
    tmp_path.chmod(0o700)
    assert native.build_library(tmp_path, [f"-march={processor}", "-O0"]).exists()


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("lanes", [4, 16])
def test_other_vector_widths_give_the_same_numbers(lanes: int, tmp_path: Path):
    """Machines with narrower or wider vectors run other code: build it here, slow but right."""
    tmp_path.chmod(0o700)
    library = native.build_library(tmp_path, [f"-DLANES={lanes}", "-O1"])
    script = (
        "import sys, ctypes, pytest; from backend.cpu import native;"
        "assert ctypes.CDLL(sys.argv[1]).tidegate_lanes() == int(sys.argv[5]);"
        "native._loaded = lambda lib=native._declared(ctypes.CDLL(sys.argv[1])): lib;"
        "sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', '-m', 'not slow', '-k', *sys.argv[2:5]]))"
    )
    model_tests = str(Path(__file__).with_name("test_native_llama.py"))
    chosen = "product or sums or bits or mixed or formats or nan or tied"
    done = subprocess.run(
        [sys.executable, "-c", script, str(library), chosen, __file__, model_tests, str(lanes)],
        check=False,
        capture_output=True,
        text=True,
        env=os.environ,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stdout[-3000:]
