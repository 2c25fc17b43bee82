from __future__ import annotations

import random

import pytest

from backend.engine.pace import IDLE_STEP_S, MIN_CHUNK, Pace, StepTime
from backend.engine.params import RequestClass
from tests.backend.virtual_steps import Steps


def measured(base_s: float, row_s: float, *, sizes: tuple[int, ...] = (1, 8, 64)) -> StepTime:
    step_time = StepTime()
    for _ in range(20):
        for num_rows in sizes:
            step_time.add(num_rows, base_s + row_s * num_rows)
    return step_time


def test_the_line_through_steps_of_several_sizes_is_found():
    step_time = measured(0.010, 0.002)
    assert step_time.seconds(100) == pytest.approx(0.210, rel=0.1)
    assert step_time.rows_within(0.050) == pytest.approx(20, abs=2)


def test_steps_of_one_size_are_taken_as_proportional():
    step_time = measured(0.010, 0.002, sizes=(4,))
    assert step_time.seconds(8) == pytest.approx(2 * 0.018)


def test_the_estimate_follows_a_machine_that_has_become_slower():
    step_time = measured(0.010, 0.002)
    for _ in range(100):
        for num_rows in (1, 8, 64):
            step_time.add(num_rows, 0.030 + 0.004 * num_rows)
    assert step_time.seconds(32) == pytest.approx(0.158, rel=0.15)


def test_one_step_held_up_by_something_else_moves_the_estimate_little():
    step_time = measured(0.010, 0.002)
    before_s = step_time.seconds(8)
    step_time.add(8, 5.0)
    assert step_time.seconds(8) < 1.5 * before_s


def test_noise_never_makes_rows_free_or_more_than_proportional():
    step_time, rng = StepTime(), random.Random(1)
    for _ in range(500):
        step_time.add(rng.choice([3, 4, 5]), rng.uniform(0.001, 0.1))
        assert step_time.seconds_per_row > 0
        assert step_time.base_s >= 0


def test_a_clock_that_stands_still_measures_nothing():
    step_time = StepTime()
    step_time.add(8, 0.0)
    step_time.add(0, 1.0)
    assert not step_time.is_known


def test_before_anything_is_measured_nothing_is_limited():
    steps = Steps()
    online = [steps.add("a", 4), steps.add("b", 4, tpot_ms=50)]
    pace = Pace()
    assert pace.background_rows(2, online, [], 0.0) is None
    assert pace.prefill_rows(online, 0.0) is None
    assert pace.idle_rows(1) is None


def pace_of(base_s: float, row_s: float) -> Pace:
    pace = Pace()
    pace.step_time = measured(base_s, row_s)
    return pace


def test_without_an_objective_background_rows_make_a_step_half_as_long_again():
    online = [Steps().add("a", 4)]
    rows = pace_of(0.020, 0.001).background_rows(1, online, [], 0.0)
    assert rows == pytest.approx(10, abs=1)  # 21 ms become 31.5 ms


def test_tokens_ahead_of_their_deadlines_make_room_for_background_rows():
    pace, steps = pace_of(0.020, 0.001), Steps()
    request = steps.add("a", 4, tpot_ms=50)
    request.append(7)
    request.first_token_s = 0.0
    early, late = (pace.background_rows(1, [request], [], now_s) for now_s in (-1.0, 1.0))
    assert early == pytest.approx(46, abs=2)  # 1.5 x 45 ms
    assert late == pytest.approx(1, abs=1)  # half of 45 ms


def test_one_row_is_let_in_however_tight_it_is():
    request = Steps().add("a", 4, tpot_ms=1)
    assert pace_of(0.020, 0.001).background_rows(1, [request], [], 0.0) == 1


def test_a_prompt_short_of_time_lets_no_background_row_in():
    steps = Steps()
    urgent = steps.add("a", 200, RequestClass.INTERACTIVE, ttft_ms=400)
    assert pace_of(0.020, 0.001).background_rows(200, [], [urgent], 0.0) == 0


def test_a_prompt_with_time_lets_a_fifth_more_in():
    steps = Steps()
    patient = steps.add("a", 200, ttft_ms=5000)
    rows = pace_of(0.020, 0.001).background_rows(200, [], [patient], 0.0)
    assert rows == pytest.approx(44, abs=2)


def test_online_prefill_is_cut_to_what_token_deadlines_leave():
    pace, request = pace_of(0.020, 0.001), Steps().add("a", 4, tpot_ms=100)
    request.append(7)
    request.first_token_s = 0.0
    in_time, early = (pace.prefill_rows([request], now_s) for now_s in (0.0, -9.0))
    assert in_time == pytest.approx(69, abs=2)  # 90 ms
    assert early == pytest.approx(339, abs=8)  # four times that


def test_online_prefill_always_moves():
    request = Steps().add("a", 4, tpot_ms=1)
    assert pace_of(0.020, 0.001).prefill_rows([request], 0.0) == MIN_CHUNK


def test_a_step_nobody_waits_for_is_short_all_the_same():
    rows = pace_of(0.020, 0.001).idle_rows(4)
    assert rows == pytest.approx((IDLE_STEP_S - 0.020) / 0.001, abs=3)


def test_a_step_nobody_waits_for_has_room_for_all_rows_that_decode_and_some_prefill():
    assert pace_of(0.020, 0.010).idle_rows(60) == 60 + MIN_CHUNK
