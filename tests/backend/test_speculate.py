from __future__ import annotations

import random

import pytest

from backend.engine.drafts import Drafts
from backend.engine.ngram import TokenHistory
from backend.engine.speculate import MAX_DRAFTS, StepCost, guesses_worth

# n-grams


def test_what_followed_before_is_guessed_again():
    assert TokenHistory().continuation([1, 2, 3, 4, 5, 9, 1, 2], 3) == [3, 4, 5]


def test_one_token_in_common_is_no_match():
    assert TokenHistory().continuation([1, 2, 3, 9, 2], 3) == []


@pytest.mark.parametrize("tokens", [[1], [1, 1], [1, 2], [1, 2, 3]])
def test_nothing_is_guessed_of_nothing(tokens: list[int]):
    assert TokenHistory().continuation(tokens, 4) == []


def test_the_longer_match_wins_over_the_later():
    tokens = [7, 1, 2, 50, 8, 1, 2, 60, 7, 1, 2]
    assert TokenHistory().continuation(tokens, 1) == [50]


def test_the_later_of_equal_matches_wins():
    assert TokenHistory().continuation([1, 2, 50, 0, 1, 2, 60, 5, 1, 2], 1) == [60]


def test_a_repetition_goes_on_beyond_the_end():
    assert TokenHistory().continuation([5, 1, 2, 3, 1, 2, 3], 7) == [1, 2, 3, 1, 2, 3, 1]


def test_a_history_that_grows_guesses_as_one_made_at_once():
    rng, history = random.Random(0), TokenHistory()
    tokens = [rng.randrange(3) for _ in range(5)]
    for _ in range(600):
        tokens += [rng.randrange(3) for _ in range(rng.randint(1, 3))]
        assert history.continuation(tokens, 5) == TokenHistory().continuation(tokens, 5)


# How many


def test_more_is_guessed_where_more_was_right():
    counts = [guesses_worth(acceptance, 0.1) for acceptance in (0.05, 0.3, 0.6, 0.8, 1.0)]
    assert counts == [0, 1, 4, MAX_DRAFTS, MAX_DRAFTS]


def test_less_is_guessed_where_a_row_costs_more():
    counts = [guesses_worth(0.7, price) for price in (0.05, 0.2, 0.5, 0.69, 0.71, 1.0, 3.0)]
    assert counts == [8, 4, 1, 1, 0, 0, 0]


def test_a_guess_that_never_pays_is_not_made_even_if_it_is_free():
    assert guesses_worth(0.01, 0.0) == 0


def test_a_full_batch_makes_guesses_dear():
    cost = StepCost()
    for _ in range(20):
        for rows in (1, 2, 4, 8, 16, 32):
            cost.add_step(rows, 10.0 + rows)
    assert cost.guess_price(1) == pytest.approx(1 / 11, rel=0.01)
    assert cost.guess_price(32) == pytest.approx(32 / 42, rel=0.01)


def test_a_slow_drafter_makes_guesses_dear():
    cost = StepCost()
    for _ in range(20):
        for rows in (1, 2, 4, 8):
            cost.add_step(rows, 10.0 + rows)
        for _ in range(10):
            cost.add_guesses(4, 20.0)
    assert cost.guess_price(1) == pytest.approx(6 / 11, rel=0.01)


def test_before_anything_is_measured_guesses_are_tried():
    assert guesses_worth(Drafts().acceptance, StepCost().guess_price(1)) >= 4


def test_one_slow_step_does_not_change_the_price_much():
    cost = StepCost()
    for _ in range(30):
        for rows in (1, 2, 4, 8):
            cost.add_step(rows, 10.0 + rows)
    before = cost.guess_price(1)
    cost.add_step(8, 10_000.0)
    assert cost.guess_price(1) < 4 * before


def test_prefill_says_nothing_about_the_price_of_a_row():
    cost = StepCost()
    for _ in range(20):
        cost.add_step(512, 1000.0)
    assert cost.guess_price(1) == StepCost().guess_price(1)


def test_wrong_guesses_end_the_guessing_and_time_brings_it_back():
    drafts = Drafts()
    price = StepCost().guess_price(8)
    while guesses_worth(drafts.acceptance, price):
        drafts.token_ids = [1]
        drafts.record(num_tested=1, num_accepted=0)
    assert drafts.num_proposed < 20
    num_idle = 0
    while not guesses_worth(drafts.acceptance, price):
        drafts.fade()
        num_idle += 1
    assert 1 <= num_idle < 200
