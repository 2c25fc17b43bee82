"""Speculation keeps the law of every token: chi-square against the model's own probabilities, as in engine-peers 6,
reports 18 and 19."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from backend.engine.noise import uniform
from backend.engine.params import SamplingParams
from backend.engine.rejection import accept_or_resample
from backend.engine.sampler import Guess, Sampler, law
from tests.backend.test_sampler import make_request

NUM_DRAWS = 1500
TARGET = np.array([0.4, 0.3, 0.2, 0.07, 0.03])
DRAFTS = {
    "one guess, likely": np.array([1.0, 0, 0, 0, 0]),
    "one guess, unlikely": np.array([0, 0, 0, 0, 1.0]),
    "the same law": TARGET,
    "another law": np.array([0.1, 0.2, 0.3, 0.2, 0.2]),
    "apart": np.array([0, 0, 0.2, 0.3, 0.5]),
    "flat": np.full(5, 0.2),
}


def p_value(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """Of a chi-square test, by Wilson and Hilferty's approximation."""
    kept = probabilities > 0
    assert counts[~kept].sum() == 0
    expected = probabilities[kept] * counts.sum()
    degrees = int(kept.sum()) - 1
    statistic = ((counts[kept] - expected) ** 2 / expected).sum()
    spread = 2 / (9 * degrees)
    z = ((statistic / degrees) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)
    return math.erfc(z / math.sqrt(2)) / 2


def test_the_p_value_is_that_of_a_chi_square_table():
    counts = np.array([50, 30, 20])  # against 40, 40, 20: 5.0 at two degrees of freedom, p = 0.0821
    assert p_value(counts, np.array([0.4, 0.4, 0.2])) == pytest.approx(0.0821, abs=0.003)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("draft", DRAFTS.values(), ids=DRAFTS)
def test_what_comes_out_has_the_law_of_the_target(draft: np.ndarray, seed: int):
    rng = np.random.default_rng(seed)
    counts = np.zeros(5)
    for guess in rng.choice(5, NUM_DRAWS, p=draft):
        counts[accept_or_resample(TARGET, draft, guess, rng.random(), rng.exponential(size=5))] += 1
    assert p_value(counts, TARGET) > 0.01


def test_report_19_a_law_that_is_not_the_guess_own_is_found_out():
    """The test can fail: a guess taken by argmax and judged as if it were drawn."""
    draft, rng = DRAFTS["another law"], np.random.default_rng(0)
    counts = np.zeros(5)
    for _ in range(NUM_DRAWS):
        counts[accept_or_resample(TARGET, draft, 2, rng.random(), rng.exponential(size=5))] += 1
    assert p_value(counts, TARGET) < 1e-6


def test_equal_laws_always_accept():
    rng = np.random.default_rng(0)
    for guess in range(5):
        assert (
            accept_or_resample(TARGET, TARGET, guess, 1 - 2**-53, rng.exponential(size=5)) == guess
        )


LOGITS = np.log(np.array([0.3, 0.25, 0.2, 0.1, 0.06, 0.04, 0.03, 0.02], np.float32))
DRAFT_LOGITS = np.log(np.array([0.1, 0.3, 0.05, 0.2, 0.1, 0.1, 0.05, 0.1], np.float32))


def speculated(
    num_draws: int, first_seed: int, *, seeded: bool, **params: Any
) -> tuple[np.ndarray, float]:
    """Tokens drawn with a guess of `DRAFT_LOGITS` before each, and how many guesses were right."""
    sampler, counts, num_right = Sampler(8), np.zeros(8), 0
    for seed in range(first_seed, first_seed + num_draws):
        request = make_request(seed=seed, **params)
        if seeded:
            request.params = SamplingParams(**params, seed=seed)
        sampler.guess(DRAFT_LOGITS, request)
        (token_id,) = request.drafts.token_ids
        guess = Guess(token_id, request.drafts.laws[0]) if request.drafts.laws else None
        draw = sampler.sample(LOGITS, request, guess)
        assert draw is not None
        counts[draw.token_id] += 1
        num_right += draw.token_id == token_id
    return counts, num_right / num_draws


@pytest.mark.parametrize("seeded", [True, False])
@pytest.mark.parametrize(
    "params",
    [{}, {"temperature": 0.5}, {"top_p": 0.7}, {"top_k": 3}, {"min_p": 0.3}, {"temperature": 2.0}],
    ids=str,
)
def test_report_18_guessing_does_not_change_the_law(seeded: bool, params: dict[str, Any]):
    counts, _ = speculated(NUM_DRAWS, 1000, seeded=seeded, **params)
    assert p_value(counts, law(LOGITS, SamplingParams(**params))) > 0.01


@pytest.mark.parametrize("first_seed", range(0, 100_000, 10_000))
def test_guessing_does_not_change_the_law_for_any_seed(first_seed: int):
    for seeded in (True, False):
        counts, _ = speculated(800, first_seed, seeded=seeded)
        assert p_value(counts, law(LOGITS, SamplingParams())) > 0.01


def test_guesses_are_right_as_often_as_they_can_be():
    """Not seeded: as often as the laws overlap. Seeded, with shared noise: less, by no more than its bound."""
    overlap = float(np.minimum(np.exp(LOGITS), np.exp(DRAFT_LOGITS)).sum())
    _, unseeded = speculated(NUM_DRAWS, 0, seeded=False)
    _, seeded = speculated(NUM_DRAWS, 0, seeded=True)
    assert unseeded == pytest.approx(overlap, abs=0.03)
    assert seeded > overlap / (2 - overlap) - 0.03


def test_a_seeded_token_is_the_one_without_a_guess():
    sampler = Sampler(8)
    for seed in range(200):
        request = make_request(seed=seed)
        request.params = SamplingParams(seed=seed)
        plain = sampler.sample(LOGITS, request)
        sampler.guess(DRAFT_LOGITS, request)
        assert request.drafts.laws == []
        assert sampler.sample(LOGITS, request) == plain


@pytest.mark.parametrize(
    "params",
    [{}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.5}, {"top_k": 3, "top_p": 0.6}],
    ids=str,
)
def test_the_law_is_how_often_tokens_are_drawn(params: dict[str, Any]):
    sampler, counts = Sampler(8), np.zeros(8)
    for seed in range(NUM_DRAWS):
        draw = sampler.sample(LOGITS, make_request(seed=seed, **params))
        assert draw is not None
        counts[draw.token_id] += 1
    wanted = law(LOGITS, SamplingParams(**params))
    if np.count_nonzero(wanted) > 1:
        assert p_value(counts, wanted) > 0.01
    assert wanted.sum() == pytest.approx(1.0)


def test_uniform_noise_is_uniform():
    values = np.array([uniform(key * 7919) for key in range(NUM_DRAWS)])
    assert 0.0 < values.min() < 0.01
    assert 0.99 < values.max() < 1.0
    assert p_value(np.histogram(values, 10, (0, 1))[0], np.full(10, 0.1)) > 0.01
