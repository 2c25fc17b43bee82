from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.engine.detokenizer import Detokenizer
from backend.engine.logit_rules import LogitRules
from backend.engine.noise import TokenNoise, draw_key
from backend.engine.params import RequestClass, SamplingParams
from backend.engine.request import EngineRequest
from backend.engine.sampler import Draw, Sampler, kept_ids

EOS = 0


def row(values: list[float]) -> np.ndarray:
    return np.array(values, np.float32)


def of_probabilities(*probabilities: float) -> np.ndarray:
    return np.log(row(list(probabilities)))


def make_request(
    prompt: tuple[int, ...] = (1,), output: tuple[int, ...] = (), seed: int = 0, **params: Any
) -> EngineRequest:
    sampling = SamplingParams(**params)
    rules = (
        LogitRules(sampling, list(prompt), frozenset({EOS}))
        if LogitRules.needed(sampling)
        else None
    )
    request = EngineRequest(
        request_id="r",
        params=sampling,
        klass=RequestClass.STANDARD,
        arrival=0,
        arrival_s=0.0,
        token_ids=list(prompt),
        num_prompt_tokens=len(prompt),
        max_output_tokens=100,
        seed=seed,
        root=b"",
        detokenizer=Detokenizer(),
        rules=rules,
    )
    for token_id in output:
        request.append(token_id)
    return request


def draw(logits: np.ndarray, **request: Any) -> Draw:
    result = Sampler(len(logits)).sample(logits, make_request(**request))
    assert result is not None
    return result


def frequencies(logits: np.ndarray, num_draws: int, **params: Any) -> dict[int, float]:
    sampler = Sampler(len(logits))
    requests = [make_request(seed=seed, **params) for seed in range(num_draws)]
    draws = [sampler.sample(logits, request) for request in requests]
    counts = Counter(result.token_id for result in draws if result is not None)
    return {token_id: count / num_draws for token_id, count in counts.items()}


def test_temperature_zero_takes_the_largest_logit():
    assert draw(row([0.1, 3.0, 2.9]), temperature=0.0).token_id == 1


def test_draws_follow_the_softmax():
    probabilities = [0.5, 0.25, 0.15, 0.1]
    seen = frequencies(of_probabilities(*probabilities), 4000)
    chi_square = sum(4000 * (seen.get(i, 0) - p) ** 2 / p for i, p in enumerate(probabilities))
    assert chi_square < 16.3  # 3 degrees of freedom, p = 0.001; the seeds are fixed


def test_temperature_sharpens_the_law():
    seen = frequencies(of_probabilities(0.6, 0.4), 2000, temperature=0.5)
    assert seen[0] == pytest.approx(0.36 / 0.52, abs=0.03)


def test_top_k_keeps_the_k_likeliest():
    assert set(frequencies(row([1.0, 1.1, 1.2, 1.3]), 300, top_k=2)) == {2, 3}


def test_top_p_keeps_the_smallest_set_that_reaches_it():
    assert set(frequencies(of_probabilities(0.5, 0.3, 0.15, 0.05), 300, top_p=0.7)) == {0, 1}


def test_top_p_zero_keeps_the_likeliest():
    assert set(frequencies(of_probabilities(0.4, 0.6), 50, top_p=0.0)) == {1}


def test_top_p_is_measured_within_what_top_k_left():
    law = of_probabilities(0.4, 0.3, 0.2, 0.1)
    assert set(frequencies(law, 300, top_p=0.7)) == {0, 1}  # 0.4 + 0.3 reaches 0.7
    assert set(frequencies(law, 300, top_p=0.6, top_k=2)) == {
        0,
        1,
    }  # 0.57 of the two does not reach 0.6
    assert set(frequencies(law, 300, top_p=0.55, top_k=2)) == {0}


def test_min_p_drops_what_is_far_below_the_likeliest():
    assert set(frequencies(of_probabilities(0.5, 0.3, 0.15, 0.05), 300, min_p=0.5)) == {0, 1}


def test_truncation_of_a_flat_law_over_a_large_vocabulary_is_exact():
    logits = np.random.default_rng(0).normal(size=9000).astype(np.float32) * 0.1
    params = SamplingParams(top_p=0.5)
    kept = kept_ids(logits, float(logits.max()), params)
    weights = np.sort(np.exp(logits.astype(np.float64)))[::-1]
    count = int(np.searchsorted(np.cumsum(weights), weights.sum() / 2)) + 1
    assert abs(len(kept) - count) <= 1
    assert set(kept.tolist()) == set(np.argsort(-logits)[: len(kept)].tolist())


@settings(max_examples=80, deadline=None)
@given(
    spread=st.sampled_from([0.0, 0.3, 2.0, 12.0]),
    size=st.sampled_from([2, 7, 333, 5000]),
    seed=st.integers(0, 2**64 - 1),
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
    min_p=st.sampled_from([0.0, 0.2]),
)
def test_the_shortcut_finds_the_winner_of_the_whole_race(
    spread: float, size: int, seed: int, temperature: float, min_p: float
):
    logits = np.random.default_rng(seed % 1000).normal(size=size).astype(np.float32) * np.float32(
        spread
    )
    noise = TokenNoise(size).exponential(draw_key(seed, 1), np.arange(size))
    weights = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    weights[weights < min_p * (1 - 1e-9)] = 0.0
    with np.errstate(divide="ignore"):
        winner = int((noise / weights).argmin())
    assert draw(logits, seed=seed, temperature=temperature, min_p=min_p).token_id == winner


@pytest.mark.parametrize("limit", [0.0, 1e-4, 0.01, 0.3, 50.0])
def test_every_token_with_noise_below_a_limit_is_named(limit: float):
    noise, ids = TokenNoise(1001), np.arange(1001)
    below = set(ids[noise.exponential(77, ids) < limit].tolist())
    named = noise.ids_below(77, limit).tolist()
    assert below <= set(named)
    assert len(named) <= 20 * len(below) + 16


def test_noise_of_a_token_does_not_depend_on_which_others_are_asked_for():
    noise, ids = TokenNoise(1001), np.array([5, 6, 500, 1000])
    assert np.array_equal(noise.exponential(9, ids), noise.exponential(9, np.arange(1001))[ids])


def test_noise_is_exponential_over_tokens_positions_and_seeds():
    noise = TokenNoise(4096)
    over_tokens = noise.exponential(draw_key(1, 1), np.arange(4096))
    one = np.array([5])
    over_positions = np.array(
        [noise.exponential(draw_key(1, position), one)[0] for position in range(2000)]
    )
    over_seeds = np.array([noise.exponential(draw_key(seed, 1), one)[0] for seed in range(2000)])
    for sample in (over_tokens, over_positions, over_seeds):
        counts, _ = np.histogram(np.exp(-sample), bins=16, range=(0, 1))
        expected = len(sample) / 16
        assert (
            (counts - expected) ** 2 / expected
        ).sum() < 37.7  # 15 degrees of freedom, p = 0.001


def test_noise_of_neighbouring_tokens_is_independent():
    noise = TokenNoise(64)
    uniform = np.array(
        [np.exp(-noise.exponential(draw_key(seed, 1), np.arange(18))) for seed in range(4000)]
    )
    correlation = np.corrcoef(uniform.T) - np.eye(18)
    assert np.abs(correlation).max() < 0.065  # 4 standard errors


def test_seed_and_position_fix_the_draw_and_vary_it():
    logits = np.zeros(1000, np.float32)
    first = draw(logits, seed=1).token_id
    assert draw(logits, seed=1).token_id == first
    assert draw(logits, seed=2).token_id != first
    assert draw(logits, seed=1, output=(3,)).token_id != first


def test_a_draw_does_not_depend_on_the_other_rows():
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(6, 500)).astype(np.float32)
    requests = [
        make_request(seed=i, **params)
        for i, params in enumerate(
            [{}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.1}, {"temperature": 0.0}, {}]
        )
    ]
    sampler = Sampler(500)
    together = [sampler.sample(row, item) for row, item in zip(logits, requests, strict=True)]
    alone = [Sampler(500).sample(row, item) for row, item in zip(logits, requests, strict=True)]
    assert together == alone


def test_a_row_of_nan_is_reported():
    request = make_request(temperature=0.0)
    assert Sampler(3).sample(row([1.0, math.nan, 2.0]), request) is None
    assert Sampler(3).sample(row([0.0, 1.0, 0.0]), request) == Draw(1, None)


def test_logit_bias_forces_and_forbids():
    assert draw(row([1.0, 2.0, 3.0]), temperature=0.0, logit_bias={0: 100.0}).token_id == 0
    assert draw(row([1.0, 2.0, 3.0]), temperature=0.0, logit_bias={2: -100.0}).token_id == 1


def test_presence_penalty_counts_once_and_frequency_penalty_every_time():
    logits = row([0.0, 1.0, 0.0, 0.0])
    assert draw(logits, output=(1, 1, 1), temperature=0.0, presence_penalty=0.9).token_id == 1
    assert draw(logits, output=(1, 1, 1), temperature=0.0, frequency_penalty=0.35).token_id != 1


def test_presence_and_frequency_penalties_spare_the_prompt():
    logits = row([0.0, 1.0, 0.0])
    chosen = draw(
        logits, prompt=(1, 1), temperature=0.0, presence_penalty=2.0, frequency_penalty=2.0
    )
    assert chosen.token_id == 1


def test_repetition_penalty_also_counts_the_prompt():
    logits = row([1.5, 2.0, -1.0])
    assert draw(logits, prompt=(1,), temperature=0.0, repetition_penalty=2.0).token_id == 0


def test_repetition_penalty_pushes_negative_logits_down():
    logits = row([-3.0, -1.0, -1.5])
    assert draw(logits, prompt=(1,), temperature=0.0, repetition_penalty=2.0).token_id == 2


def test_penalties_hold_for_more_distinct_tokens_than_the_first_buffer():
    rules = LogitRules(SamplingParams(presence_penalty=1.0), [], frozenset())
    for token_id in range(100):
        rules.append(token_id)
    logits = np.zeros(128, np.float32)
    rules.apply(logits)
    assert logits.tolist() == [-1.0] * 100 + [0.0] * 28


def test_min_tokens_bans_the_end_of_turn_until_reached():
    logits = row([9.0, 1.0, 5.0])
    params = {"temperature": 0.0, "min_tokens": 2, "stop_token_ids": (2,)}
    assert draw(logits, output=(1,), **params).token_id == 1
    assert draw(logits, output=(1, 1), **params).token_id == EOS


def test_logprobs_come_from_the_raw_logits():
    logits = of_probabilities(0.5, 0.3, 0.2)
    chosen = draw(logits, temperature=0.3, top_p=0.4, logit_bias={1: 50.0}, logprobs=3)
    assert chosen.token_id == 1
    assert chosen.logprob is not None
    assert chosen.logprob.logprob == pytest.approx(math.log(0.3), abs=1e-5)
    assert [token_id for token_id, _ in chosen.logprob.top] == [0, 1, 2]
    assert [value for _, value in chosen.logprob.top] == pytest.approx(
        np.log([0.5, 0.3, 0.2]).tolist(), abs=1e-5
    )


def test_logprobs_zero_gives_the_chosen_token_alone():
    logprob = draw(of_probabilities(0.5, 0.5), temperature=0.0, logprobs=0).logprob
    assert logprob is not None
    assert logprob.top == ()
    assert logprob.logprob == pytest.approx(math.log(0.5), abs=1e-5)


def test_top_logprobs_of_equal_logits_include_the_greedy_choice():
    chosen = draw(np.zeros(6000, np.float32), temperature=0.0, logprobs=2)
    assert chosen.logprob is not None
    assert [token_id for token_id, _ in chosen.logprob.top] == [chosen.token_id, 1]


def test_an_impossible_token_reports_the_floor():
    logprob = draw(row([0.0, -math.inf]), temperature=0.0, logprobs=2).logprob
    assert logprob is not None
    assert logprob.top == ((0, 0.0), (1, -9999.0))


def test_a_vanishing_temperature_is_greedy():
    assert draw(row([1.0, 1.0001]), temperature=1e-30).token_id == 1
