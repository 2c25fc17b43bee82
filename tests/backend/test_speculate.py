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


def stairs(a: float, b: float) -> list[float]:
    return [a + b * (1 + k) for k in range(MAX_DRAFTS + 1)]


def test_more_is_guessed_where_more_was_right():
    counts = [guesses_worth(acceptance, stairs(10, 1)) for acceptance in (0.05, 0.3, 0.6, 0.8, 1.0)]
    assert counts == [0, 1, 3, 6, MAX_DRAFTS]


def test_less_is_guessed_where_a_row_costs_more():
    counts = [guesses_worth(0.7, stairs(10, b)) for b in (0.1, 0.5, 2, 8, 20, 30, 1000)]
    assert counts == sorted(counts, reverse=True)
    assert (counts[0], counts[-1]) == (9, 0)


def test_the_last_row_of_a_stair_is_taken_and_the_next_is_not():
    seconds = [10.0, 10.0, 10.0, 10.0, 20.0, 20.0, 20.0, 20.0, 30.0, 30.0, 30.0]
    assert guesses_worth(0.7, seconds) == 3


def measured(**seconds: float) -> StepCost:
    cost = StepCost()
    for _ in range(20):
        for rows, value in seconds.items():
            cost.add_step(int(rows.removeprefix("rows")), value)
    return cost


def test_what_was_measured_is_known_and_the_rest_lies_between():
    seconds = measured(rows1=10.0, rows3=20.0, rows4=40.0).with_guesses(1)
    assert seconds[:4] == [10.0, 15.0, 20.0, 40.0]
    assert seconds[4] == 50.0


def test_a_full_batch_makes_guesses_dear():
    cost = measured(**{f"rows{n}": 10.0 + n for n in (1, 2, 4, 8, 16, 32, 64, 128)})
    counts = [guesses_worth(0.7, cost.with_guesses(n)) for n in (1, 4, 16, 64)]
    assert counts == sorted(counts, reverse=True)
    assert (counts[0] >= 4, counts[-1]) == (True, 0)


def test_a_slow_drafter_makes_guesses_dear():
    cost = measured(rows1=10.0, rows2=10.0, rows4=10.0, rows8=10.0, rows11=10.0)
    assert guesses_worth(0.7, cost.with_guesses(1)) == MAX_DRAFTS
    for _ in range(60):
        cost.add_guesses(4, 40.0)
    assert guesses_worth(0.7, cost.with_guesses(1)) == 0


def test_before_anything_is_measured_guesses_are_tried():
    assert guesses_worth(Drafts().acceptance, StepCost().with_guesses(1)) >= 3


def test_one_slow_step_hardly_counts_and_a_faster_one_does():
    cost = measured(rows1=10.0)
    cost.add_step(1, 20.0)
    assert cost.with_guesses(1)[0] < 10.5
    for _ in range(9):
        cost.add_step(1, 5.0)
    assert cost.with_guesses(1)[0] < 5.5


def test_wrong_guesses_end_the_guessing_and_time_brings_it_back():
    drafts = Drafts()
    seconds = StepCost().with_guesses(8)
    while guesses_worth(drafts.acceptance, seconds):
        drafts.token_ids = [1]
        drafts.record(num_tested=1, num_accepted=0)
    assert drafts.num_proposed < 20
    num_idle = 0
    while not guesses_worth(drafts.acceptance, seconds):
        drafts.fade()
        num_idle += 1
    assert 1 <= num_idle < 200
