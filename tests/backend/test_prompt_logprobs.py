"""Prompt logprobs: what every prompt token's logprob is, however the prompt was cut, cached, preempted."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from backend.engine import step_budget
from backend.engine.params import GenerationRequest, InvalidGeneration, StepOutput, TokenLogprob
from tests.backend.toy_model import ToyModel, joined, new_engine, request, run

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT = [7, 3, 9, 9, 21, 40, 5, 5, 5, 60, 2, 11, 30, 8, 1, 44, 13]


def scored(request_id: str = "a", ids: list[int] = PROMPT, **params: Any) -> GenerationRequest:
    return request(request_id, ids, **{"prompt_logprobs": 2, "max_tokens": 3, **params})


def assert_same(entries: list[TokenLogprob], expected: list[TokenLogprob]) -> None:
    assert [entry.token_id for entry in entries] == [entry.token_id for entry in expected]
    assert math.isnan(entries[0].logprob)
    got, want = ([entry.logprob for entry in side[1:]] for side in (entries, expected))
    assert np.allclose(got, want, atol=1e-4)


def token_by_token() -> list[TokenLogprob]:
    """The logprob of each prompt token as the first generated token behind what precedes it."""
    entries = [TokenLogprob(PROMPT[0], math.nan)]
    for end in range(1, len(PROMPT)):
        out = run(
            new_engine(),
            request("a", PROMPT[:end], max_tokens=1, logprobs=0, logit_bias={PROMPT[end]: 100.0}),
        )["a"]
        entries += out.logprobs
    return entries


EXPECTED = token_by_token()


@pytest.mark.parametrize("budget", [1, 2, 3, 16, 17, 512])
def test_prompt_logprobs_do_not_depend_on_the_chunks(budget: int):
    out = run(new_engine(max_num_batched_tokens=budget), scored())["a"]
    assert_same(out.prompt_logprobs, EXPECTED)


def test_the_likeliest_tokens_stand_beside_each_but_the_first():
    entries = run(new_engine(), scored())["a"].prompt_logprobs
    assert [len(entry.top) for entry in entries] == [0, *[2] * (len(PROMPT) - 1)]
    assert all(entry.top[0][1] >= entry.logprob for entry in entries[1:])


def test_nothing_comes_out_before_the_prefill_ends_and_the_entries_come_once():
    engine = new_engine(max_num_batched_tokens=4)
    engine.add(scored())
    outputs: list[StepOutput] = []
    for _ in range(4):
        assert engine.step() == []
    while engine.has_work:
        outputs += engine.step()
    assert [len(out.prompt_logprobs) for out in outputs] == [len(PROMPT), 0, 0]


def test_scoring_a_prompt_in_the_cache_computes_it_again():
    engine = new_engine()
    run(engine, request("warm", PROMPT))
    out = run(engine, scored())["a"]
    assert out.num_cached_tokens == 0
    assert_same(out.prompt_logprobs, EXPECTED)


def test_a_scored_prompt_may_be_found_by_others():
    engine = new_engine()
    run(engine, scored())
    assert run(engine, request("next", PROMPT))["next"].num_cached_tokens == 16


def test_the_text_is_that_without_scores():
    plain = run(new_engine(), request("a", PROMPT, max_tokens=3))["a"]
    assert run(new_engine(), scored())["a"].token_ids == plain.token_ids


def test_no_tokens_are_generated_when_none_are_asked_for():
    out = run(new_engine(), scored(max_tokens=0))["a"]
    assert_same(out.prompt_logprobs, EXPECTED)
    assert (out.token_ids, out.text, out.finish_reason) == ([], "", "length")
    assert out.num_output_tokens == 0


def test_a_prompt_that_fills_the_context_can_be_scored():
    engine = new_engine(max_model_len=len(PROMPT))
    assert_same(run(engine, scored(max_tokens=0))["a"].prompt_logprobs, EXPECTED)


def test_one_token_has_no_logprob():
    (entry,) = run(new_engine(), scored(ids=[5], max_tokens=0))["a"].prompt_logprobs
    assert (entry.token_id, math.isnan(entry.logprob), entry.top) == (5, True, ())


def test_preemption_in_the_middle_of_scoring_loses_and_repeats_nothing():
    engine = new_engine(num_blocks=12, max_num_batched_tokens=6)
    longer = [request(str(i), [i + 1] * 9, max_tokens=20) for i in range(2)]
    outputs = run(engine, *longer, *[scored(f"s{i}", max_tokens=9) for i in range(2)])
    assert engine.stats().num_preemptions > 0
    for i in range(2):
        assert_same(outputs[f"s{i}"].prompt_logprobs, EXPECTED)


def test_a_preempted_prompt_finds_what_it_has_scored_and_no_more():
    engine = new_engine(max_num_batched_tokens=6)
    engine.add(scored())
    engine.step()
    engine.step()  # 12 of 17 tokens
    (item,) = engine._scheduler.running
    engine._scheduler._preempt(item)
    outputs = engine.step()
    assert item.num_computed_tokens == 12 + 5
    assert_same(joined(outputs)["a"].prompt_logprobs, EXPECTED)


def test_a_step_scores_a_bounded_number_of_rows(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(step_budget, "MAX_SCORED_ROWS", 5)
    model = ToyModel()
    outputs = run(new_engine(model), *[scored(str(i), max_tokens=0) for i in range(3)])
    assert max(model.num_tokens_seen) == 5
    for out in outputs.values():
        assert_same(out.prompt_logprobs, EXPECTED)


def test_scored_and_plain_requests_share_a_step():
    plain = [request(f"p{i}", PROMPT[i:], max_tokens=5) for i in range(3)]
    outputs = run(new_engine(), plain[0], scored(), *plain[1:])
    assert_same(outputs["a"].prompt_logprobs, EXPECTED)
    for item in plain:
        alone = run(new_engine(), item)[item.request_id]
        assert outputs[item.request_id].token_ids == alone.token_ids


def test_no_tokens_without_scores_is_refused():
    with pytest.raises(InvalidGeneration, match="max_tokens must be between 1 and"):
        new_engine().add(request("a", [1], max_tokens=0))


def test_the_mean_logprob_is_that_of_all_tokens():
    out = run(new_engine(), request("a", PROMPT, logprobs=0, max_tokens=6))["a"]
    assert out.mean_logprob == pytest.approx(np.mean([entry.logprob for entry in out.logprobs]))
