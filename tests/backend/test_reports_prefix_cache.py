"""Reports of users of other engines about their prefix caches, each driven through ours."""

from __future__ import annotations

import pytest
import torch

from backend.engine.block_pool import BlockPool, extend_keys, root_digest
from backend.engine.params import GenerationRequest, RequestClass
from tests.backend.real_engine import TIERS, llama_engine
from tests.backend.toy_model import ToyModel, joined, new_engine, request, run

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPT = [3 + (7 * i) % 250 for i in range(53)]


def cold(item: GenerationRequest) -> list[int]:
    return run(new_engine(), item)[item.request_id].token_ids


@pytest.mark.parametrize("tier", TIERS)
def test_report_01_vllm_40896_the_same_prompt_three_times_gives_one_answer(tier: str) -> None:
    engine = llama_engine(tier)
    outputs = [run(engine, request(str(i), PROMPT, max_tokens=40))[str(i)] for i in range(3)]
    assert [out.num_cached_tokens for out in outputs] == [0, 48, 48]
    assert outputs[0].token_ids == outputs[1].token_ids == outputs[2].token_ids


def test_report_02_vllm_5543_blocks_of_answers_cut_by_a_stop_string_serve_others() -> None:
    engine = new_engine()
    warm_up = [
        request(str(i), [i, 2, 3], max_tokens=40, stop=("A", "E", "I", "~")) for i in range(1, 7)
    ]
    warmed = run(engine, *warm_up)
    assert "stop" in {out.finish_reason for out in warmed.values()}
    for item in warm_up:
        whole = item.prompt_ids + warmed[item.request_id].token_ids
        for cut in range(4, len(whole) + 1, 3):
            target = request("target", whole[:cut], max_tokens=4)
            assert run(engine, target)["target"].token_ids == cold(target)
    assert engine.stats().num_cached_tokens > 0


@pytest.mark.parametrize("tier", TIERS)
def test_report_03_tenstorrent_415_a_prefill_that_resumes_from_the_cache_equals_a_miss(
    tier: str,
) -> None:
    engine = llama_engine(tier)
    run(engine, request("first", PROMPT[:40], max_tokens=1))
    hit = run(engine, request("hit", PROMPT, max_tokens=40, logprobs=3))["hit"]
    miss = run(llama_engine(tier), request("miss", PROMPT, max_tokens=40, logprobs=3))["miss"]
    assert (hit.num_cached_tokens, miss.num_cached_tokens) == (32, 0)
    assert hit.token_ids == miss.token_ids
    hit_logprobs, miss_logprobs = ([e.logprob for e in out.logprobs] for out in (hit, miss))
    assert hit_logprobs == pytest.approx(miss_logprobs, abs=1e-3)


@pytest.mark.parametrize("num_blocks", [1, 2, 3])
def test_report_04_nano_vllm_144_a_cached_prompt_of_whole_blocks_recomputes_its_last_token(
    num_blocks: int,
) -> None:
    engine, item = new_engine(), request("a", list(range(1, 4 * num_blocks + 1)))
    first = run(engine, item)["a"]
    again = run(engine, item)["a"]
    assert again.token_ids == first.token_ids
    assert again.num_cached_tokens == 4 * num_blocks - 4


@pytest.mark.parametrize("num_steps", range(2, 12))
def test_report_05_nano_vllm_211_a_preempted_sequence_finds_its_own_blocks_again(
    num_steps: int,
) -> None:
    """Whatever it had done when it was preempted: what it computes next is counted after the lookup."""
    model = ToyModel()
    engine = new_engine(model, max_num_seqs=1)
    victim = request("a", list(range(1, 12)), RequestClass.BATCH, max_tokens=16)
    engine.add(victim)
    outputs = [out for _ in range(num_steps) for out in engine.step()]
    engine.add(request("urgent", [60, 61], RequestClass.INTERACTIVE, max_tokens=2))
    num_tokens_before = sum(model.num_tokens_seen)
    while engine.has_work:
        outputs += engine.step()
    assert engine.stats().num_preemptions == 1
    assert joined(outputs)["a"].token_ids == cold(victim)
    num_recomputed = sum(model.num_tokens_seen) - num_tokens_before - 3 - (16 - num_steps)
    assert num_recomputed <= 4  # at most its last block


def test_report_06_nano_vllm_208_prompts_that_share_a_prefix_in_one_step_read_no_unwritten_block():
    shared = list(range(1, 41))
    items = [request(str(i), [*shared, 41 + i], max_tokens=12) for i in range(6)]
    for budget in (8, 24, 512):
        model = ToyModel()
        engine = new_engine(model, max_num_batched_tokens=budget)
        outputs = run(engine, *items)
        assert {key: out.token_ids for key, out in outputs.items()} == {
            item.request_id: cold(item) for item in items
        }
        assert sum(model.num_tokens_seen) == 41 + 5 + 6 * 11  # and it is computed once


def test_report_07_openvino_3722_a_block_whose_digest_collides_is_no_hit() -> None:
    """The tokens are compared as well; the digest is 32 bytes and begins with the tenant and the model."""
    pool, keys = BlockPool(4), []
    extend_keys(keys, root_digest("model", b"tenant", 4), [1, 2, 3, 4], 4)
    (block,) = pool.allocate(1) or []
    pool.publish(block, keys[0])
    assert pool.lookup(keys) == [block]
    assert pool.lookup([keys[0]._replace(tokens=b"\0" * 16)]) == []
    assert len(keys[0].digest) == 32
    roots = {root_digest(m, salt, 4) for m, salt in (("ab", b"c"), ("a", b"bc"), ("abc", b""))}
    assert len(roots) == 3


@pytest.mark.parametrize("length", [16, 17, 31])
def test_report_08_vllm_13105_prompt_logprobs_of_a_cached_prompt_are_computed_again(
    length: int,
) -> None:
    engine, item = new_engine(), request("a", list(range(1, length + 1)), prompt_logprobs=2)
    run(engine, request("warm", item.prompt_ids))
    warm, want = run(engine, item)["a"], run(new_engine(), item)["a"]
    assert len(warm.prompt_logprobs) == length
    assert warm.prompt_logprobs[1:] == want.prompt_logprobs[1:]
    assert warm.token_ids == want.token_ids


@pytest.mark.parametrize("tier", TIERS)
def test_report_09_vllm_36939_what_lies_in_blocks_of_nobody_is_never_read(tier: str) -> None:
    """A CPU step has no padding rows, so what remains is: tables are padded, and blocks are used again."""
    engine, clean = llama_engine(tier, num_blocks=12), llama_engine(tier)
    for tensor in (*engine._runner._kv.keys, *engine._runner._kv.values):
        tensor.fill_(1e4)
    items = [request(str(i), PROMPT[i : i + 5 + 9 * i], max_tokens=30) for i in range(4)]
    for _ in range(2):
        outputs = run(engine, *items)
        for item in items:
            assert outputs[item.request_id].token_ids == run(clean, item)[item.request_id].token_ids
    assert torch.isfinite(engine._runner._kv.keys[0]).all()
