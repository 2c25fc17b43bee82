from __future__ import annotations

from backend.engine.params import RequestClass
from backend.engine.request import EngineRequest, Status
from backend.engine.scheduler import MAX_SKIPS
from tests.backend.virtual_steps import Steps


def test_a_long_prompt_is_computed_in_chunks_of_the_budget():
    steps = Steps(max_num_batched_tokens=8)
    steps.add("long", 20)
    assert [steps.step() for _ in range(4)] == [{"long": 8}, {"long": 8}, {"long": 4}, {"long": 1}]


def test_decoding_rows_come_first_and_a_prefill_fills_the_rest():
    steps = Steps(max_num_batched_tokens=8)
    steps.add("a", 3)
    assert steps.step() == {"a": 3}
    steps.add("b", 20)
    assert steps.step() == {"a": 1, "b": 7}
    assert steps.step() == {"a": 1, "b": 7}
    assert steps.step() == {"a": 1, "b": 6}


def test_several_waiting_prompts_share_one_step():
    steps = Steps(max_num_batched_tokens=10)
    for name in "abc":
        steps.add(name, 4)
    assert steps.step() == {"a": 4, "b": 4, "c": 2}


def test_waiting_requests_are_admitted_by_class_then_arrival():
    steps = Steps(max_num_batched_tokens=4, max_num_seqs=4)
    steps.add("batch", 4, RequestClass.BATCH)
    steps.add("late", 4, RequestClass.STANDARD)
    steps.add("urgent", 4, RequestClass.INTERACTIVE)
    assert steps.step() == {"urgent": 4}
    assert steps.step() == {"urgent": 1, "late": 3}


def test_no_more_requests_run_than_the_budget_can_decode():
    steps = Steps(max_num_batched_tokens=2, max_num_seqs=64)
    for name in "abc":
        steps.add(name, 1)
    for _ in range(3):
        assert steps.step() == {"a": 1, "b": 1}


def test_a_cached_prefix_is_not_computed_again():
    steps = Steps()
    prompt = list(range(10))
    first = steps.add("first", prompt)
    steps.step()
    steps.scheduler.finish(first)
    second = steps.add("second", [*prompt[:8], 99, 98, 97])
    assert steps.step() == {"second": 3}
    assert second.num_cached_tokens == 8


def test_a_fully_cached_prompt_leaves_its_last_block_to_compute():
    steps = Steps()
    prompt = list(range(8))
    steps.scheduler.finish(_stepped(steps, steps.add("first", prompt)))
    second = steps.add("second", prompt)
    assert steps.step() == {"second": 4}
    assert second.num_cached_tokens == 4


def test_a_prefix_under_way_is_waited_for_instead_of_computed_twice():
    steps = Steps(max_num_batched_tokens=8)
    prompt = list(range(12))
    steps.add("a", prompt)
    steps.add("b", prompt)
    assert steps.step() == {"a": 8}
    assert steps.step() == {"a": 4, "b": 4}  # only its last block, which it must compute anyway


def test_waiting_for_a_prefix_does_not_hold_up_others():
    steps = Steps(max_num_batched_tokens=16)
    prompt = list(range(12))
    steps.add("a", prompt)
    steps.add("b", prompt)
    steps.add("c", 3)
    assert steps.step() == {"a": 12, "c": 3}


def test_an_urgent_request_does_not_wait_for_the_prefix_of_a_batch_one():
    steps = Steps(max_num_batched_tokens=8)
    prompt = list(range(16))
    steps.add("batch", prompt, RequestClass.BATCH)
    steps.step()
    steps.add("urgent", prompt, RequestClass.INTERACTIVE)
    steps.scheduler._max_num_batched_tokens = 16
    assert steps.step() == {"batch": 8, "urgent": 8}


def test_the_latest_request_is_preempted_and_resumes_first():
    steps = Steps(num_blocks=4)
    a, b = steps.add("a", 7), steps.add("b", 3)
    steps.step()
    c = steps.add("c", 3)
    seen = [steps.step() for _ in range(2)]
    assert b.status is Status.WAITING  # `a` needed a third block
    assert seen[-1] == {"a": 1}
    steps.scheduler.finish(a)
    assert list(steps.step()) == ["b", "c"]
    assert c.status is Status.RUNNING


def test_a_batch_request_is_preempted_before_an_older_standard_one():
    steps = Steps(num_blocks=5)
    batch = steps.add("batch", 3, RequestClass.BATCH)
    standard, late = steps.add("standard", 7), steps.add("late", 3)
    steps.step()
    steps.step()
    steps.step()
    assert batch.status is Status.WAITING
    assert {standard.status, late.status} == {Status.RUNNING}


def test_a_step_that_preempted_admits_nobody():
    steps = Steps(num_blocks=6)
    steps.add("a", 8)
    b = steps.add("b", 12)
    steps.step()
    steps.add("tiny", 1)
    assert steps.step() == {"a": 1}  # `b` gave up three blocks, and `tiny` would fit
    assert b.status is Status.WAITING
    assert "tiny" in steps.step()


def test_a_preempted_request_resumes_before_one_that_it_had_passed():
    steps = Steps(num_blocks=8)
    steps.add("a", 16)
    steps.step()
    steps.add("huge", 28)
    small = steps.add("small", 2)
    steps.step()
    steps.scheduler._preempt(small)
    assert [request.request_id for request in steps.scheduler.waiting] == ["small", "huge"]


def test_a_preempted_request_recomputes_prompt_and_output_but_keeps_the_border():
    steps = Steps(enable_prefix_cache=False)
    request = steps.add("a", 6)
    for _ in range(4):
        steps.step()
    steps.scheduler._preempt(request)
    assert steps.step() == {"a": 10}
    assert (request.num_prompt_tokens, request.num_output_tokens) == (6, 5)


def test_a_resumed_request_finds_its_own_blocks_in_the_cache():
    steps = Steps()
    request = steps.add("a", 6)
    for _ in range(4):
        steps.step()
    steps.scheduler._preempt(request)
    assert steps.step() == {"a": 2}  # 10 tokens, 8 of them in two published blocks
    assert request.num_cached_tokens == 0  # reported is what the prompt found at first admission


def test_admission_waits_until_the_whole_prompt_fits():
    steps = Steps(num_blocks=8, max_num_batched_tokens=8)
    a = steps.add("a", 12)
    steps.step()
    steps.add("b", 20)
    for _ in range(3):
        assert list(steps.step()) == ["a"]
    steps.scheduler.finish(a)
    assert [steps.step() for _ in range(3)] == [{"b": 8}, {"b": 8}, {"b": 4}]


def test_a_small_request_passes_one_that_waits_for_blocks():
    steps = Steps(num_blocks=8)
    steps.add("a", 16)
    steps.step()
    steps.add("huge", 28)
    steps.add("small", 2)
    assert steps.step() == {"a": 1, "small": 2}


def test_a_small_request_of_a_worse_class_does_not_pass_one_that_waits_for_blocks():
    steps = Steps(num_blocks=8)
    steps.add("a", 16)
    steps.step()
    steps.add("huge", 28)
    steps.add("small", 2, RequestClass.BATCH)
    assert steps.step() == {"a": 1}


def test_an_idle_pool_takes_a_request_that_needs_all_of_it():
    steps = Steps(num_blocks=4)
    steps.add("a", 16)
    assert steps.step() == {"a": 16}


def test_a_request_that_waits_for_blocks_is_passed_only_so_often():
    steps = Steps(num_blocks=16)
    steps.add("a", 32)
    steps.step()
    huge = steps.add("huge", 60)
    steps.now_s += 1.0  # what comes now is ranked behind it
    for i in range(MAX_SKIPS):
        small = steps.add(f"small {i}", 2)
        steps.step()
        steps.scheduler.finish(small)
        steps.scheduler.running[0].token_ids.pop()  # keep "a" from growing
        steps.scheduler.running[0].num_computed_tokens -= 1
    assert huge.num_skipped == MAX_SKIPS
    steps.add("one too many", 2)
    assert steps.step() == {"a": 1}


def test_an_urgent_request_takes_the_slot_of_a_batch_one():
    steps = Steps(max_num_seqs=2)
    batches = [steps.add(f"batch {i}", 4, RequestClass.BATCH) for i in range(2)]
    steps.step()
    steps.add("urgent", 4, RequestClass.INTERACTIVE)
    assert steps.step() == {"batch 0": 1, "urgent": 4}
    assert batches[1].status is Status.WAITING


def test_an_urgent_request_takes_the_blocks_of_batch_ones():
    steps = Steps(num_blocks=8)
    steps.add("batch 0", 11, RequestClass.BATCH)
    steps.add("batch 1", 11, RequestClass.BATCH)
    steps.step()
    steps.add("urgent", 14, RequestClass.INTERACTIVE)
    seen = [steps.step() for _ in range(2)]
    assert any("urgent" in step for step in seen)


def test_equals_do_not_preempt_one_another_for_a_slot():
    steps = Steps(max_num_seqs=1)
    steps.add("a", 4)
    steps.step()
    steps.add("b", 4)
    assert steps.step() == {"a": 1}
    assert steps.scheduler.num_preemptions == 0


def test_without_the_prefix_cache_nothing_is_shared():
    steps = Steps(enable_prefix_cache=False)
    prompt = list(range(12))
    steps.scheduler.finish(_stepped(steps, steps.add("a", prompt)))
    steps.add("b", prompt)
    assert steps.step() == {"b": 12}


def _stepped(steps: Steps, request: EngineRequest) -> EngineRequest:
    steps.step()
    return request
