"""Whatever arrives, in whatever order, over however small a pool: everything ends, and nothing is lost on the way."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from backend.engine.params import RequestClass
from backend.engine.request import EngineRequest, Status
from tests.backend.virtual_steps import BLOCK, Steps

MAX_MODEL_LEN = 40
PREFIX = list(range(24))

arrivals = st.tuples(
    st.integers(0, 24),  # tokens of the common prefix
    st.integers(1, 8),  # and of its own
    st.integers(1, 8),  # of output
    st.sampled_from(RequestClass),
    st.sampled_from([None, 1.0, 1000.0]),  # ttft_ms
    st.sampled_from([None, 5.0, 100.0]),  # tpot_ms
    st.integers(0, 4),  # steps until the next arrives
)
setups = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(MAX_MODEL_LEN // BLOCK, 24),
        "max_num_seqs": st.integers(1, 6),
        "max_num_batched_tokens": st.sampled_from([1, 5, 16, 64]),
        "enable_prefix_cache": st.booleans(),
        "window": st.sampled_from([None, 5, 16]),
        "base_s": st.sampled_from([0.0, 0.01, 3.0]),
        "row_s": st.sampled_from([0.0, 0.001, 1.0]),
    }
)


class Checked(Steps):
    """Steps that look at what the scheduler hands out."""

    def step(self) -> dict[str, int]:
        scheduler = self.scheduler
        has_work = bool(scheduler.waiting or scheduler.running)
        computed = super().step()
        assert bool(computed) == has_work
        assert sum(computed.values()) <= scheduler._max_num_batched_tokens
        assert scheduler.running == sorted(scheduler.running, key=lambda r: r.run_rank)
        assert scheduler.waiting == sorted(scheduler.waiting, key=lambda r: r.queue_rank)
        slots = [request.slot for request in scheduler.running]
        assert sorted(slots + scheduler._free_slots) == list(range(scheduler._max_num_seqs))
        for request in scheduler.running:
            assert len(request.block_table) * BLOCK >= request.num_tokens - 1
            assert request.num_wanted_tokens >= 1
        return computed


def run_all(
    steps: Checked, plan: list[tuple], aborts: set[int]
) -> tuple[list[EngineRequest], list[EngineRequest]]:
    """-> those that ran to their end, those that were aborted on the way."""
    requests: list[EngineRequest] = []
    for i, (shared, own, output, klass, ttft_ms, tpot_ms, pause) in enumerate(plan):
        prompt = [*PREFIX[:shared], *(1000 * i + n for n in range(100, 100 + own))]
        requests.append(
            steps.add(str(i), prompt, klass, max_tokens=output, ttft_ms=ttft_ms, tpot_ms=tpot_ms)
        )
        for _ in range(pause):
            steps.step()
        if i in aborts:
            steps.scheduler.finish(requests[i // 2])
    ended = [
        r for i, r in enumerate(requests) if i not in {j // 2 for j in aborts if j < len(plan)}
    ]
    work = sum(request.num_tokens + request.max_output_tokens for request in requests)
    for request in ended:
        steps.run_until(request, max_steps=50 * work + 1000)
    return ended, [request for request in requests if request not in ended]


@settings(max_examples=150, deadline=None)
@given(setups, st.lists(arrivals, min_size=1, max_size=12), st.sets(st.integers(0, 11), max_size=3))
def test_every_request_ends_once_and_every_block_comes_back(setup, plan, aborts):
    steps = Checked(**setup)
    ended, aborted = run_all(steps, plan, aborts)
    assert all(request.status is Status.FINISHED for request in [*ended, *aborted])
    for request in ended:
        assert len(steps.token_times_s[request.request_id]) == request.max_output_tokens
    assert not steps.scheduler.waiting
    assert not steps.scheduler.running
    assert steps.pool.num_free == steps.pool.num_blocks


@settings(max_examples=40, deadline=None)
@given(setups, st.lists(arrivals, min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_nobody_starves_under_a_flood_of_better_requests(setup, plan, rng):
    setup = {**setup, "base_s": 3.0}  # so that patience runs out within the test
    steps = Checked(**setup)
    waiting = [
        steps.add(str(i), shared + own, klass, max_tokens=output)
        for i, (shared, own, output, klass, *_) in enumerate(plan)
    ]
    for count in range(3000):
        if all(request.status is Status.FINISHED for request in waiting):
            return
        flood = [
            r for r in [*steps.scheduler.waiting, *steps.scheduler.running] if r not in waiting
        ]
        if len(flood) < 8:
            steps.add(f"flood {count}", rng.randint(1, 20), RequestClass.INTERACTIVE, max_tokens=4)
        steps.step()
    raise AssertionError([r for r in waiting if r.status is not Status.FINISHED])
