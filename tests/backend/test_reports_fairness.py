"""Reports of users of other engines about fairness, aborts and leaks, each driven through ours."""

from __future__ import annotations

import gc
import random
import tracemalloc
from types import FunctionType, ModuleType

import pytest

from backend.engine.block_pool import BlockPool
from backend.engine.engine import LLMEngine
from backend.engine.ngram import TokenHistory
from backend.engine.params import RequestClass, StepOutput
from backend.engine.request import EngineRequest
from backend.engine.sampler import Sampler
from tests.backend.toy_model import ToyModel, joined, new_engine, request, run

pytestmark = pytest.mark.usefixtures("one_thread")


def steps_to_end(engine: LLMEngine) -> dict[str, int]:
    """In which step each request ended."""
    ended: dict[str, int] = {}
    while engine.has_work:
        ended |= {
            out.request_id: engine.stats().num_steps for out in engine.step() if out.finish_reason
        }
    return ended


def test_report_46_vllm_15105_a_thousand_sequences_cost_the_start_no_logits() -> None:
    """Draws are made row by row: what a start allocates does not grow with max_num_seqs x vocabulary."""
    tracemalloc.start()
    try:
        Sampler(262_144)
        new_engine(ToyModel(), max_num_seqs=1024, max_num_batched_tokens=1024)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 16 << 20  # 1024 rows of 262144 float32 logits alone take 1 GiB


def test_report_48_vllm_31731_small_requests_pass_one_that_waits_for_blocks() -> None:
    engine = new_engine(num_blocks=24, max_num_seqs=8)
    engine.add(request("runs", [1] * 30, max_tokens=60))
    engine.step()
    engine.add(request("heavy", [2] * 80, max_tokens=10))
    for i in range(5):
        engine.add(request(f"small {i}", [3, i + 1], max_tokens=3))
    ended = steps_to_end(engine)
    assert all(ended[f"small {i}"] < ended["runs"] for i in range(5))
    assert ended["heavy"] > ended["runs"]


def test_report_48_vllm_31731_newcomers_do_not_pass_the_waiting_one_for_ever() -> None:
    engine = new_engine(num_blocks=24, max_num_seqs=4)
    engine.add(request("runs", [1] * 30, max_tokens=30))
    engine.step()
    engine.add(request("heavy", [2] * 80, max_tokens=1))
    ended: set[str] = set()
    for i in range(600):
        if "heavy" in ended:
            break
        engine.add(request(f"small {i}", [3, 1 + i % 60], max_tokens=3))
        ended |= {out.request_id for out in engine.step() if out.finish_reason}
    assert "heavy" in ended


def test_report_49_vllm_41951_a_preempted_request_resumes_before_later_equals() -> None:
    engine = new_engine(num_blocks=14, max_num_seqs=3)
    for name in ("first", "second"):
        engine.add(request(name, [len(name)] * 16, max_tokens=20))
    while engine.stats().num_preemptions == 0:
        engine.step()
    for i in range(4):
        engine.add(request(f"late {i}", [20 + i] * 16, max_tokens=20))
    ended = steps_to_end(engine)
    assert list(ended)[:2] == ["first", "second"]


def test_report_49_vllm_45561_an_urgent_request_takes_a_slot_of_many_that_are_not() -> None:
    engine = new_engine(max_num_seqs=4)
    for i in range(8):
        engine.add(request(f"batch {i}", [i + 1] * 6, RequestClass.BATCH, max_tokens=50))
    engine.step()
    engine.add(request("urgent", [9, 9], RequestClass.INTERACTIVE, max_tokens=2))
    assert steps_to_end(engine)["urgent"] <= 3


@pytest.mark.parametrize("speculative", ["off", "ngram"])
def test_report_50_sglang_6778_a_drained_engine_has_every_block_free_after_any_load(
    speculative: str,
) -> None:
    engine, rng = new_engine(num_blocks=40, speculative=speculative), random.Random(7)
    for wave in range(20):
        items = [
            request(
                f"{wave} {i}",
                [rng.randrange(1, 3), *[1, 2, 3] * 13][: rng.randint(1, 40)],
                max_tokens=rng.randint(1, 30),
                stop=("A", "~") if rng.random() < 0.5 else (),
            )
            for i in range(rng.randint(1, 6))
        ]
        run(engine, *items)  # which checks that all blocks are free
    assert engine.stats().num_cached_tokens > 0


def reachable(root: object) -> list[object]:
    """Every object that hangs on `root`, modules, classes and their code aside."""
    seen: dict[int, object] = {id(root): root}
    todo = [root]
    while todo:
        for held in gc.get_referents(todo.pop()):
            if id(held) not in seen and type(held) not in (ModuleType, type, FunctionType):
                seen[id(held)] = held
                todo.append(held)
    return list(seen.values())


@pytest.mark.parametrize("how", ["off", "ngram", "draft"])
def test_report_50_sglang_6778_nothing_is_kept_of_requests_that_have_gone(how: str) -> None:
    """Ended, aborted while they wait and while they run: no part of the engine still holds one."""
    draft = {"draft_model": ToyModel()} if how == "draft" else {"speculative": how}
    engine = new_engine(num_blocks=20, max_num_seqs=3, **draft)
    for i in range(12):
        engine.add(request(str(i), [1, 2, 3] * (1 + i), max_tokens=5 + i, logprobs=1))
    for i in range(0, 12, 3):
        engine.abort(str(i))
        engine.step()
    while engine.has_work:
        engine.step()
    kept = {type(held) for held in reachable(engine)}
    assert not {EngineRequest, TokenHistory} & kept
    assert BlockPool in kept  # so it looks deep enough


@pytest.mark.parametrize("num_steps", range(8))
@pytest.mark.parametrize("speculative", ["off", "ngram"])
def test_report_51_lmcache_3688_an_abort_in_any_step_frees_and_hurts_nobody(
    num_steps: int, speculative: str
) -> None:
    kept = request("kept", [5, 6, 7] * 4, max_tokens=12)
    engine = new_engine(num_blocks=14, max_num_batched_tokens=8, speculative=speculative)
    engine.add(request("gone", [5, 6, 7] * 7, max_tokens=20))
    engine.add(kept)
    outputs: list[StepOutput] = []
    for _ in range(num_steps):
        outputs += engine.step()
    engine.abort("gone")
    while engine.has_work:
        outputs += engine.step()
    assert engine.stats().num_free_blocks == 14
    assert joined(outputs)["kept"].token_ids == run(new_engine(), kept)["kept"].token_ids


def test_report_52_vllm_18485_an_abort_before_the_first_schedule_is_no_event() -> None:
    engine = new_engine()
    engine.add(request("a", [1, 2, 3]))
    engine.abort("a")
    engine.abort("a")
    engine.abort("never seen")
    assert not engine.has_work
    assert engine.step() == []
    assert run(engine, request("a", [1, 2, 3]))["a"].num_output_tokens == 12
