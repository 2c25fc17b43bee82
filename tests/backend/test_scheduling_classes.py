"""Classes, deadlines and ageing, on a virtual clock: who waits, for how long, and who never waits for ever."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from backend.engine.params import RequestClass
from backend.engine.request import EngineRequest, Status
from backend.engine.scheduler import MAX_SKIPS
from backend.engine.urgency import PATIENCE_S
from tests.backend.virtual_steps import Steps

INTERACTIVE, STANDARD, FLEX, BATCH = RequestClass


# Prefill within a class


def test_a_short_prompt_does_not_wait_for_long_ones():
    steps = Steps(num_blocks=4000, base_s=0.01, row_s=0.001, max_num_batched_tokens=100)
    for i in range(3):
        steps.add(f"long {i}", 2000, INTERACTIVE)
    steps.step()
    steps.add("short", 20, INTERACTIVE)
    assert steps.step()["short"] == 20


def test_a_long_prompt_is_passed_only_by_what_comes_within_its_own_time():
    steps = Steps(num_blocks=4000, base_s=0.0, row_s=0.001, max_num_batched_tokens=100)
    long = steps.add("long", 1000, max_tokens=1)  # a second of work
    for i in range(60):  # short ones that could fill every step
        steps.add(f"short {i}", 100, max_tokens=1)
        steps.step()
        if long.status is Status.FINISHED:
            break
    assert steps.now_s == pytest.approx(2.0, abs=0.3)


def test_the_tighter_deadline_goes_first_within_a_class():
    steps = Steps(max_num_batched_tokens=8)
    steps.add("loose", 8)
    steps.add("tight", 8, ttft_ms=100)
    assert steps.step() == {"tight": 8}


def test_a_tight_deadline_does_not_pass_a_better_class():
    steps = Steps(max_num_batched_tokens=8)
    steps.add("standard", 8, ttft_ms=1)
    steps.add("interactive", 8, INTERACTIVE, ttft_ms=60_000)
    assert steps.step() == {"interactive": 8}


def test_an_admitted_prompt_with_one_token_left_to_compute_is_in_that_step():
    steps = Steps()
    prompt = list(range(9))
    steps.add("first", prompt, max_tokens=1)
    steps.step()
    steps.add("again", prompt, max_tokens=1)
    assert steps.step() == {"again": 1}


# Background work beside online work


def test_background_rows_wait_while_an_online_prompt_is_short_of_time():
    steps = Steps(num_blocks=400, base_s=0.01, row_s=0.001, max_num_batched_tokens=64)
    steps.add("batch", 40, BATCH)
    for _ in range(3):
        steps.step()
    steps.add("online", 300, INTERACTIVE, max_tokens=2, ttft_ms=350)
    for num_tokens in (64, 64, 64, 64, 44):
        assert steps.step() == {"online": num_tokens}
    assert "batch" in steps.step()


def test_online_token_deadlines_hold_beside_a_crowd_of_batch_rows():
    steps = Steps(num_blocks=4000, base_s=0.010, row_s=0.001)
    for i in range(40):
        steps.add(f"batch {i}", 100, BATCH)
    for _ in range(60):
        steps.step()
    for i in range(4):
        steps.add(f"online {i}", 20, INTERACTIVE, tpot_ms=40, max_tokens=100)
    while any(r.klass is INTERACTIVE for r in [*steps.scheduler.running, *steps.scheduler.waiting]):
        steps.step()
    for i in range(4):
        first_s, *later = steps.token_times_s[f"online {i}"]
        assert all(at_s <= first_s + 0.040 * n + 1e-9 for n, at_s in enumerate(later, 1))
    first_s = steps.token_times_s["online 0"][0]
    batch = [
        at_s for name, times in steps.token_times_s.items() if "batch" in name for at_s in times
    ]
    assert sum(at_s > first_s for at_s in batch) > 1000


def test_without_an_objective_batch_rows_make_online_steps_half_as_long_again_at_most():
    steps = Steps(num_blocks=4000, base_s=0.010, row_s=0.001)
    for i in range(40):
        steps.add(f"batch {i}", 100, BATCH)
    for _ in range(60):
        steps.step()
    steps.add("online", 20, max_tokens=100)
    while len(steps.token_times_s["online"]) < 60:
        steps.step()
    times = steps.token_times_s["online"]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert max(gaps) < 1.6 * 0.011


def test_batch_work_alone_uses_every_row():
    steps = Steps(num_blocks=4000, base_s=0.010, row_s=0.001)
    for i in range(40):
        steps.add(f"batch {i}", 4, BATCH)
    for _ in range(20):
        steps.step()
    assert len(steps.step()) == 40


def test_a_batch_prompt_alone_is_cut_so_that_an_arrival_waits_little():
    steps = Steps(num_blocks=4000, base_s=0.010, row_s=0.001)
    steps.add("warm", 4, BATCH, max_tokens=10)
    for _ in range(12):
        steps.step()
    steps.add("batch", 2000, BATCH)
    before_s = steps.now_s
    steps.step()
    assert steps.now_s - before_s < 0.15


def test_batch_requests_leave_a_block_for_each_online_row():
    steps = Steps(num_blocks=12)
    for i in range(3):
        steps.add(f"online {i}", 4)
    steps.step()
    steps.add("batch", 24, BATCH)
    assert "batch" not in steps.step()


def test_bursts_of_online_requests_meet_their_objectives_beside_endless_batch_work():
    """Two online requests a second in bursts; a step takes 10 ms and 0.3 ms a row."""
    rng = random.Random(1)
    steps = Steps(num_blocks=2000, base_s=0.010, row_s=0.0003)
    online: list[tuple[EngineRequest, float]] = []
    arrival_s, num_batch = 0.0, 0
    while steps.now_s < 20.0:
        while sum(request.klass is BATCH for request in steps.scheduler.waiting) < 4:
            num_batch += 1
            tokens, prompt = rng.randint(50, 200), rng.randint(100, 400)
            steps.add(f"batch {num_batch}", prompt, BATCH, max_tokens=tokens)
        while arrival_s <= steps.now_s:
            prompt = min(600, int(rng.lognormvariate(5, 0.8)) + 1)
            request = steps.add(
                f"online {len(online)}",
                prompt,
                INTERACTIVE,
                max_tokens=rng.randint(10, 60),
                ttft_ms=500,
                tpot_ms=40,
            )
            online.append((request, steps.now_s))
            arrival_s += rng.expovariate(4.0 if int(arrival_s / 10) % 2 else 0.6)
        steps.step()
    ended = [(r, at_s) for r, at_s in online if r.status is Status.FINISHED]
    for request, arrived_s in ended:
        first_s, *_, last_s = steps.token_times_s[request.request_id]
        assert first_s - arrived_s <= 0.5
        assert last_s - first_s <= 0.040 * (request.num_output_tokens - 1)
    assert len(ended) > 30
    batch = [times for name, times in steps.token_times_s.items() if name.startswith("batch")]
    assert sum(map(len, batch)) > 20 * 400  # tokens a second


# Nobody starves


def flood(steps: Steps, count: int) -> None:
    """Keep so many interactive requests in the scheduler."""
    running = [
        r for r in [*steps.scheduler.running, *steps.scheduler.waiting] if r.klass is INTERACTIVE
    ]
    for i in range(count - len(running)):
        steps.add(f"flood {steps.now_s} {i}", 8, INTERACTIVE, max_tokens=20)


@pytest.mark.parametrize("klass", [STANDARD, FLEX, BATCH])
def test_a_flood_of_interactive_requests_starves_nobody(klass: RequestClass):
    steps = Steps(num_blocks=200, base_s=0.5, row_s=0.01, max_num_seqs=4)
    flood(steps, 8)
    patient = steps.add("patient", 10, klass, max_tokens=30)
    while patient.status is not Status.FINISHED:
        flood(steps, 8)
        steps.step()
        assert steps.now_s < PATIENCE_S[klass] + 60
    assert steps.now_s > PATIENCE_S[klass]


def test_only_one_request_at_a_time_is_served_above_its_class():
    steps = Steps(num_blocks=200, base_s=0.5, row_s=0.01, max_num_seqs=4)
    for i in range(10):
        steps.add(f"batch {i}", 4, BATCH, max_tokens=30)
    while steps.now_s < PATIENCE_S[BATCH] + 100:
        flood(steps, 8)
        steps.step()
        everyone = [*steps.scheduler.waiting, *steps.scheduler.running]
        assert sum(request.served_as < request.klass for request in everyone) <= 1


def test_the_one_that_stood_still_longest_is_next():
    steps = Steps(num_blocks=200, base_s=0.5, row_s=0.01, max_num_seqs=2)
    flood(steps, 4)
    steps.step()
    first = steps.add("first", 4, BATCH, max_tokens=5)
    steps.step()
    second = steps.add("second", 4, BATCH, max_tokens=5)
    while first.status is not Status.FINISHED:
        flood(steps, 4)
        steps.step()
    assert second.status is not Status.FINISHED


def test_a_request_whose_turn_has_come_waits_for_a_free_place_and_preempts_nobody():
    steps = Steps(num_blocks=200, base_s=1.0, max_num_seqs=1)
    steps.add("running", 4, FLEX, max_tokens=400)
    steps.step()
    steps.add("patient", 4, BATCH)
    while steps.now_s < PATIENCE_S[BATCH] + 20:
        steps.step()
    assert steps.scheduler.num_preemptions == 0


def test_rows_paused_by_online_work_move_again_though_it_never_ends():
    steps = Steps(num_blocks=400, base_s=0.5, row_s=0.5, max_num_batched_tokens=64, max_num_seqs=8)
    paused = [steps.add(f"batch {i}", 4, BATCH, max_tokens=12) for i in range(3)]
    steps.step()
    for _ in range(3000):
        if all(request.status is Status.FINISHED for request in paused):
            break
        if not any(r.klass is INTERACTIVE and not r.is_decoding for r in steps.scheduler.running):
            steps.add(f"online {steps.now_s}", 200, INTERACTIVE, max_tokens=1)
        steps.step()
    assert all(request.status is Status.FINISHED for request in paused)


def test_paused_rows_move_when_all_online_work_waits_for_the_blocks_they_hold():
    steps = Steps(num_blocks=12, base_s=1.0, row_s=0.01, max_num_seqs=8)
    holders = [steps.add(f"holder {i}", 8, BATCH, max_tokens=12) for i in range(2)]
    for _ in range(3):
        steps.step()
    guest = steps.add("guest", 36, BATCH, max_tokens=1)
    guest.moved_s -= PATIENCE_S[BATCH] + 10
    steps.now_s += 2.0
    guest.num_skipped = MAX_SKIPS
    steps.step()
    steps.add("online", 4, INTERACTIVE, max_tokens=1, ttft_ms=1)
    steps.run_until(guest, max_steps=60)
    assert all(request.status is Status.FINISHED for request in holders)


# Preemption


def test_a_better_class_preempts_nobody_where_that_would_not_make_room():
    steps = Steps(num_blocks=10)
    steps.add("online", 26, INTERACTIVE)
    batch = steps.add("batch", 4, BATCH)
    steps.step()
    steps.add("large", 24, INTERACTIVE)
    steps.step()
    assert batch.status is Status.RUNNING


def test_shared_blocks_count_as_room_when_all_their_owners_would_go():
    steps = Steps(num_blocks=10, max_num_batched_tokens=64)
    prompt = list(range(29))
    steps.add("batch 0", prompt, BATCH)
    steps.step()
    steps.add("batch 1", prompt, BATCH)
    steps.step()
    steps.add("large", 30, INTERACTIVE)
    assert "large" in steps.step()


def test_a_preempted_request_resumes_before_equals_that_came_later():
    steps = Steps(num_blocks=4)
    a, b = steps.add("a", 7), steps.add("b", 3)
    steps.step()
    steps.now_s += 1.0
    steps.add("newcomer", 3, ttft_ms=1)
    while b.status is Status.RUNNING:
        steps.step()
    steps.scheduler.finish(a)
    assert "b" in steps.step()


def test_blocks_of_batch_work_are_evicted_before_older_ones_of_online_work():
    steps = Steps(num_blocks=16)
    online_prompt, batch_prompt = list(range(16)), list(range(100, 116))
    steps.add("online", online_prompt, max_tokens=1)
    steps.step()
    steps.add("batch", batch_prompt, BATCH, max_tokens=1)
    steps.step()
    steps.add("filler", 44, max_tokens=1)
    steps.step()
    again = steps.add("online again", online_prompt, max_tokens=1)
    batch_again = steps.add("batch again", batch_prompt, BATCH, max_tokens=1)
    steps.step()
    assert again.num_cached_tokens == 12
    assert batch_again.num_cached_tokens < 12


# Prefixes under way


def shared_pair(steps: Steps) -> tuple[list[int], list[int]]:
    prompt = list(range(32))
    return prompt, [*prompt[:28], 99, 98, 97, 96]


def test_two_long_prompts_in_one_step_compute_their_shared_part_once():
    steps = Steps(max_num_batched_tokens=10)
    first, second = shared_pair(steps)
    steps.add("first", first, max_tokens=1)
    waiting = steps.add("second", second, max_tokens=1)
    computed = [steps.step() for _ in range(5)]
    assert sum(step.get("second", 0) for step in computed) == 4
    assert waiting.num_cached_tokens == 28


def test_when_the_first_is_aborted_the_second_goes_on_from_what_it_published():
    steps = Steps(max_num_batched_tokens=10)
    first, second = shared_pair(steps)
    leader = steps.add("first", first)
    follower = steps.add("second", second)
    steps.step()
    steps.scheduler.finish(leader)
    assert steps.step() == {"second": 10}
    assert follower.num_cached_tokens == 8


def test_when_the_first_is_preempted_whoever_is_admitted_next_leads():
    steps = Steps(max_num_batched_tokens=10)
    first, second = shared_pair(steps)
    leader = steps.add("first", first, max_tokens=1)
    follower = steps.add("second", second, max_tokens=1)
    steps.step()
    steps.scheduler._preempt(leader)
    for _ in range(8):
        steps.step()
    assert {leader.status, follower.status} == {Status.FINISHED}


def test_a_first_that_fails_leaves_nothing_for_the_second_to_wait_for():
    steps = Steps(max_num_batched_tokens=10)
    first, second = shared_pair(steps)
    leader = steps.add("first", first)
    follower = steps.add("second", second, max_tokens=1)
    steps.step()
    steps.pool.unpublish(leader.block_table)
    steps.scheduler.finish(leader)
    steps.run_until(follower, max_steps=6)
    assert follower.num_cached_tokens == 0
