"""The native library draws the tokens that numpy draws, and reports the same log-probabilities."""

from __future__ import annotations

import numpy as np
import pytest

from backend.cpu.native_draw import native_draw
from backend.engine.noise import draw_key
from backend.engine.params import SamplingParams
from backend.engine.sampler import Sampler, token_logprob

TRUNCATIONS = [
    {},
    {"top_k": 1000},
    {"top_k": 3},
    {"top_p": 0.9},
    {"top_p": 0.0},
    {"min_p": 0.05},
    {"top_k": 40, "top_p": 0.8, "min_p": 0.02},
    {"top_k": 10**6, "top_p": 0.99},
]
SIZES = [1, 7, 33, 500, 5000]


@pytest.fixture(scope="module", autouse=True)
def _needs_the_native_tier():
    if native_draw() is None:
        pytest.skip("no native tier")


def rows(size: int) -> list[np.ndarray]:
    """From flat to steep, with ties, and with most tokens forbidden."""
    random = np.random.default_rng(size)
    plain = [
        (random.standard_normal(size) * spread).astype(np.float32) for spread in (0.0, 0.5, 3, 9)
    ]
    tied = np.round(plain[2])
    forbidden = plain[3].copy()
    forbidden[random.random(size) < 0.9] = -np.inf
    forbidden[size // 2] = 1.0
    return [*plain, tied, forbidden]


@pytest.mark.parametrize("truncation", TRUNCATIONS, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_both_draw_the_same_token(size: int, truncation: dict[str, float]):
    by_numpy, by_library = Sampler(size, native=False), Sampler(size)
    for logits in rows(size):
        for position, temperature in enumerate((0.2, 0.9, 1.7)):
            params = SamplingParams(temperature=temperature, **truncation)  # type: ignore[arg-type]
            arguments = logits, float(logits.max()), params, draw_key(size, position)
            assert by_library._draw(*arguments) == by_numpy._draw(*arguments)


@pytest.mark.parametrize("size", SIZES)
def test_both_report_the_same_log_probabilities(size: int):
    for logits in rows(size):
        wanted, got = (
            token_logprob(logits, size // 2, 6, native) for native in (None, native_draw())
        )
        assert [token_id for token_id, _ in got.top] == [token_id for token_id, _ in wanted.top]
        assert got.logprob == pytest.approx(wanted.logprob, abs=1e-5, rel=1e-6)
        assert [p for _, p in got.top] == pytest.approx([p for _, p in wanted.top], abs=1e-5)
