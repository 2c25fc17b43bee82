"""Reports of users of other engines about preemption and chunked prefill, each driven through ours."""

from __future__ import annotations

import random

import pytest
from torch import Tensor

from backend.engine.engine import LLMEngine
from backend.engine.params import GenerationRequest, RequestClass, StepOutput
from backend.models.batch import Batch, KVCache
from tests.backend.real_engine import TIERS, llama_engine
from tests.backend.toy_model import (
    ScriptModel,
    ToyModel,
    ToyTokenizer,
    joined,
    new_engine,
    request,
    run,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def alone(item: GenerationRequest) -> StepOutput:
    return run(new_engine(), item)[item.request_id]


def run_interrupted(engine: LLMEngine, item: GenerationRequest, *at_steps: int) -> StepOutput:
    """Run `item`, and after each of these steps let a request of a better class take its only slot."""
    engine.add(item)
    outputs: list[StepOutput] = []
    for step in range(10_000):
        if not engine.has_work:
            break
        if step in at_steps:
            urgent = request(f"urgent {step}", [60], RequestClass.INTERACTIVE, max_tokens=1)
            engine.add(urgent)
        outputs += engine.step()
    assert engine.stats().num_preemptions == len(at_steps)
    return joined(outputs)[item.request_id]


def test_report_10_vllm_16832_a_short_prompt_with_a_long_output_is_recomputed_whole() -> None:
    """Once 200 tokens are out behind a prompt of 3, all of them come back in chunks and none comes twice."""
    item = request("a", [1, 2, 3], RequestClass.BATCH, max_tokens=260)
    engine = new_engine(max_num_seqs=1, max_num_batched_tokens=16, enable_prefix_cache=False)
    out = run_interrupted(engine, item, 40, 200, 215)
    want = alone(item)
    assert (out.token_ids, out.text) == (want.token_ids, want.text)
    assert (out.num_prompt_tokens, out.num_output_tokens) == (3, 260)


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("step", range(6, 15))
def test_report_11_nano_vllm_217_preemption_around_a_block_border_keeps_the_drawn_token(
    step: int, prefix_cache: bool
) -> None:
    item = request("a", [1, 2, 3], RequestClass.BATCH, max_tokens=24)
    out = run_interrupted(new_engine(max_num_seqs=1, enable_prefix_cache=prefix_cache), item, step)
    assert out.token_ids == alone(item).token_ids


def test_report_12_vllm_5349_penalties_after_preemption_still_know_prompt_from_output() -> None:
    params = {"presence_penalty": 2.0, "frequency_penalty": 1.0, "repetition_penalty": 1.2}
    item = request("a", [1, 2, 3] * 4, RequestClass.BATCH, max_tokens=40, **params)
    out = run_interrupted(new_engine(max_num_seqs=1), item, 5, 17, 30)
    assert out.token_ids == alone(item).token_ids
    assert out.token_ids != alone(request("a", [1, 2, 3] * 4, max_tokens=40)).token_ids


def test_report_13_vllm_25538_a_preempted_long_prompt_resumes_only_when_all_of_it_fits() -> None:
    """Two long requests that do not fit together; each preemption is followed by progress, so there are few."""
    engine = new_engine(num_blocks=30, max_num_batched_tokens=8)
    items = [request(str(i), [i + 1, *range(1, 50)], max_tokens=40) for i in range(2)] + [
        request("2", [9], max_tokens=60)
    ]
    outputs = run(engine, *items, max_steps=300)
    assert {key: out.token_ids for key, out in outputs.items()} == {
        item.request_id: alone(item).token_ids for item in items
    }
    assert 0 < engine.stats().num_preemptions < 6


@pytest.mark.parametrize("budget", [1, 5, 16])
def test_report_14_vllm_14239_prompt_logprobs_of_a_chunked_prompt_come_once_and_whole(
    budget: int,
) -> None:
    item = request("a", list(range(1, 31)), prompt_logprobs=1, max_tokens=3)
    engine = new_engine(max_num_batched_tokens=budget)
    engine.add(item)
    outputs: list[StepOutput] = []
    while engine.has_work:
        outputs += engine.step()
    assert [len(out.prompt_logprobs) for out in outputs] == [30, 0, 0]
    assert all(out.token_ids for out in outputs)
    assert outputs[0].prompt_logprobs[1:] == alone(item).prompt_logprobs[1:]


class CountingRows(ToyModel):
    """Keeps how many rows each step asked logits of."""

    def __init__(self) -> None:
        super().__init__()
        self.num_logits: list[int] = []

    def forward(self, batch: Batch, kv: KVCache) -> Tensor:
        self.num_logits.append(len(batch.logits_rows))
        return super().forward(batch, kv)


def test_report_15_tt_xla_5830_a_row_with_nothing_scheduled_draws_nothing() -> None:
    model, items = CountingRows(), [request(str(i), [i + 1] * 21, max_tokens=5) for i in range(4)]
    engine = new_engine(model, max_num_batched_tokens=5)
    for item in items:
        engine.add(item)
    outputs: list[StepOutput] = []
    while engine.has_work:
        num_steps = engine.stats().num_steps
        made = engine.step()
        assert engine.stats().num_steps == num_steps + 1
        assert len(made) == model.num_logits[-1]
        outputs += made
    whole = joined(outputs)
    for item in items:
        assert whole[item.request_id].token_ids == alone(item).token_ids


@pytest.mark.parametrize("tier", TIERS)
def test_report_16_vllm_4697_every_budget_gives_the_same_text_for_a_long_prompt(tier: str) -> None:
    rng = random.Random(5)
    item = request("a", [rng.randrange(3, 259) for _ in range(101)], max_tokens=20)
    texts = {
        budget: run(llama_engine(tier, max_num_batched_tokens=budget), item)["a"].token_ids
        for budget in (1, 7, 16, 64, 100, 101, 512)
    }
    assert len({tuple(token_ids) for token_ids in texts.values()}) == 1
    assert len(set(texts[512])) > 3


def test_report_16_the_budget_shows_no_more_in_sampled_text() -> None:
    item = request("a", list(range(1, 60)), temperature=1.0, seed=4, max_tokens=20)
    budgets = (1, 3, 16, 58, 59, 512)
    texts = [run(new_engine(max_num_batched_tokens=b), item)["a"].token_ids for b in budgets]
    assert all(token_ids == texts[0] for token_ids in texts)


def test_report_45_llama_cpp_3969_without_an_end_of_turn_the_context_is_the_end() -> None:
    """A model that never ends its turn, asked for no particular length."""
    engine = new_engine(ScriptModel(lambda position, token: 7, max_position=48), ToyTokenizer())
    out = run(engine, request("a", [1] * 9, max_tokens=None, ignore_eos=False))["a"]
    assert (out.num_output_tokens, out.finish_reason) == (39, "length")
