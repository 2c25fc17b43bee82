"""Speculation never shows: not in the text, not in the log-probabilities, whatever it meets."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from backend.engine.engine import LLMEngine
from backend.engine.params import GenerationRequest, StepOutput
from backend.models.batch import Batch, KVCache
from tests.backend.toy_head import toy_head
from tests.backend.toy_model import (
    EOS,
    ScriptModel,
    ToyModel,
    ToyTokenizer,
    new_engine,
    request,
    run,
)

pytestmark = pytest.mark.usefixtures("one_thread")


class DraftOf(ToyModel):
    """The toy model with its logits shaken: right often, not always. With another seed it is a stranger."""

    def __init__(self, noise: float = 1.0, seed: int = 0) -> None:
        super().__init__(seed=seed)
        self._noise = torch.randn(64, 64, generator=torch.Generator().manual_seed(9)) * noise

    def forward(self, batch: Batch, kv: KVCache) -> Tensor:
        logits = super().forward(batch, kv)
        return logits + self._noise[batch.token_ids[batch.logits_rows]]


def speculating(how: str, model: ToyModel | None = None, **config: Any) -> LLMEngine:
    if how == "draft":
        return new_engine(model, draft_model=DraftOf(), **config)
    if how == "head":
        return new_engine(model, draft_head=toy_head(), **config)
    return new_engine(model, speculative=how, **config)


def prompts(count: int) -> list[list[int]]:
    """Some with a period, so that n-grams match."""
    rng = random.Random(4)
    return [
        [rng.randrange(1, 64) for _ in range(rng.randint(2, 9))] * rng.randint(1, 4)
        for _ in range(count)
    ]


def mixed(count: int, **params: Any) -> list[GenerationRequest]:
    """Greedy and seeded requests in turn; the temperature is low enough for the text to repeat itself."""
    return [
        request(
            str(i),
            ids,
            **{
                "max_tokens": 10 + i % 7,
                "temperature": 0.7 * (i % 2),
                "seed": i,
                "logprobs": 2,
                **params,
            },
        )
        for i, ids in enumerate(prompts(count))
    ]


def expected(requests: list[GenerationRequest]) -> dict[str, StepOutput]:
    return {item.request_id: run(new_engine(), item)[item.request_id] for item in requests}


EXPECTED = expected(mixed(7))


def assert_same(outputs: dict[str, StepOutput], wanted: dict[str, StepOutput]) -> None:
    for key, out in outputs.items():
        want = wanted[key]
        assert (out.token_ids, out.text) == (want.token_ids, want.text)
        assert (out.finish_reason, out.stop_reason) == (want.finish_reason, want.stop_reason)
        assert out.num_output_tokens == want.num_output_tokens
        assert [e.token_id for e in out.logprobs] == [e.token_id for e in want.logprobs]
        got, true = ([e.logprob for e in side.logprobs] for side in (out, want))
        assert np.allclose(got, true, atol=1e-3)


@pytest.mark.parametrize("how", ["off", "ngram", "draft", "head"])
@pytest.mark.parametrize(
    ("prefix_cache", "budget", "num_blocks", "batch"),
    list(itertools.product([True, False], [3, 512], [14, 256], [1, 7])),
)
def test_nothing_changes_text_or_logprobs(
    how: str, prefix_cache: bool, budget: int, num_blocks: int, batch: int
):
    engine = speculating(
        how,
        enable_prefix_cache=prefix_cache,
        max_num_batched_tokens=budget,
        num_blocks=num_blocks,
    )
    requests = mixed(7)
    for start in range(0, 7, batch):
        assert_same(run(engine, *requests[start : start + batch]), EXPECTED)
    if (budget, num_blocks, batch) == (512, 14, 7):
        assert engine.stats().num_preemptions > 0
    if budget == 512:
        assert (engine.stats().num_draft_tokens > 0) is (how != "off")
        if how == "draft" or (how, batch) == ("head", 1):
            assert engine.stats().num_accepted_tokens > 0


@pytest.mark.parametrize("how", ["ngram", "draft", "head"])
def test_guesses_save_steps(how: str):
    plain, fast = new_engine(), speculating(how)
    item = request("a", [3, 1, 4, 1, 5] * 3, max_tokens=60, frequency_penalty=-2.0)
    plain_out, fast_out = run(plain, item), run(fast, item)
    assert fast_out["a"].token_ids == plain_out["a"].token_ids
    stats = fast.stats()
    assert stats.num_steps == plain.stats().num_steps - stats.num_accepted_tokens
    assert stats.num_steps < 0.8 * plain.stats().num_steps


def test_a_perfect_draft_model_is_always_right():
    engine = new_engine(draft_model=ToyModel())
    out = run(engine, request("a", [1, 2, 3], temperature=1.0, seed=3, max_tokens=40))["a"]
    assert out.num_accepted_tokens == out.num_draft_tokens > 25


def test_a_draft_model_of_strange_mind_changes_nothing():
    engine = new_engine(draft_model=DraftOf(seed=5))
    assert_same(run(engine, *mixed(7)), EXPECTED)


@pytest.mark.parametrize("how", ["ngram", "draft", "head"])
@pytest.mark.parametrize(
    "params",
    [
        {"presence_penalty": 1.5, "frequency_penalty": 0.7, "repetition_penalty": 1.2},
        {"frequency_penalty": -1.0},
        {"logit_bias": {3: 4.0, 5: -100.0}},
        {"min_tokens": 9, "ignore_eos": False, "stop_token_ids": tuple(range(1, 30))},
        {"stop": ("~", "Cb", "the "), "max_tokens": 40},
        {"top_p": 0.6},
        {"top_k": 3},
        {"min_p": 0.2},
    ],
    ids="+".join,
)
def test_speculation_meets(how: str, params: dict[str, Any]):
    requests = mixed(4, **params)
    assert_same(run(speculating(how), *requests), expected(requests))


@pytest.mark.parametrize("how", ["ngram", "draft", "head"])
def test_choices_of_one_prompt_speculate_apart(how: str):
    ids = prompts(3)[2]
    requests = [request(str(k), ids, temperature=0.7, seed=k, max_tokens=30) for k in range(4)]
    assert_same(run(speculating(how), *requests), expected(requests))


@pytest.mark.parametrize("how", ["ngram", "draft", "head"])
def test_scored_prompts_speculate_too(how: str):
    item = request("a", [3, 1, 4, 1, 5] * 3, prompt_logprobs=1, max_tokens=20)
    out, want = run(speculating(how), item)["a"], run(new_engine(), item)["a"]
    assert out.token_ids == want.token_ids
    assert [e.top for e in out.prompt_logprobs] == [e.top for e in want.prompt_logprobs]


# Blocks


@pytest.mark.parametrize("how", ["ngram", "draft", "head"])
def test_a_block_with_an_unchecked_guess_is_never_found(how: str):
    """Every published block holds what its key says: a request that runs into it continues as if it were cold."""
    engine, ids = speculating(how), [3, 1, 4, 1, 5] * 3
    first = run(engine, request("a", ids, max_tokens=40, temperature=0.9, seed=1))["a"]
    whole = ids + first.token_ids
    for cut in range(len(ids), len(whole), 3):
        again = request("b", whole[:cut], max_tokens=6)
        assert run(engine, again)["b"].token_ids == run(new_engine(), again)["b"].token_ids


def test_guesses_take_no_block_that_another_needs():
    engine = speculating("ngram", num_blocks=9)
    outputs = run(engine, *[request(str(i), [i + 1, 2] * 6, max_tokens=8) for i in range(2)])
    assert {out.num_output_tokens for out in outputs.values()} == {8}


@pytest.mark.parametrize("how", ["ngram", "draft", "head"])
def test_the_context_may_end_in_the_middle_of_guesses(how: str):
    engine = speculating(how, max_model_len=32)
    out = run(engine, request("a", [1, 2] * 8, max_tokens=None))["a"]
    assert (out.num_output_tokens, out.finish_reason) == (16, "length")


@pytest.mark.parametrize("how", ["ngram", "draft", "head"])
def test_an_abort_among_guesses_leaves_nothing(how: str):
    engine = speculating(how)
    engine.add(request("a", [1, 2] * 8, max_tokens=100))
    for _ in range(4):
        engine.step()
    engine.abort("a")
    assert engine.stats().num_free_blocks == engine.stats().num_blocks


# Ends among guesses


def counting(length: int, **params: Any) -> tuple[StepOutput, LLMEngine]:
    """A model that counts 1, 2, .. 9, 1, 2, .. and ends its turn after `length` tokens; n-grams guess it all."""
    pieces = [b"", *(str(i).encode() for i in range(1, 10))]
    prompt = [1 + i % 9 for i in range(20)]
    model = ScriptModel(
        lambda position, token: EOS if position >= 19 + length else 1 + token % 9, len(pieces)
    )
    engine = new_engine(model, ToyTokenizer(pieces), speculative="ngram")
    out = run(engine, request("a", prompt, **{"max_tokens": 50, "ignore_eos": False, **params}))
    return out["a"], engine


def test_the_turn_may_end_among_guesses():
    out, engine = counting(15)
    assert (out.text, out.finish_reason) == ("345678912345678", "stop")
    assert out.num_output_tokens == 16
    assert engine.stats().num_steps < 6


def test_a_stop_string_may_end_among_guesses():
    out, _ = counting(30, stop=("891",))
    assert (out.text, out.stop_reason) == ("34567", "891")
    assert out.num_output_tokens == 8


def test_a_stop_token_among_guesses_shows_no_text_behind_it():
    """engine-peers 6, report 34."""
    out, _ = counting(30, stop_token_ids=(8,))
    assert (out.text, out.stop_reason, out.token_ids[-1]) == ("34567", 8, 8)


@pytest.mark.parametrize("max_tokens", [1, 2, 5, 11])
def test_the_length_is_kept_to_the_token(max_tokens: int):
    out, _ = counting(30, max_tokens=max_tokens)
    assert (out.text, out.finish_reason) == ("345678912345"[:max_tokens], "length")


def test_guesses_are_counted_by_request_and_in_all():
    out, engine = counting(30)
    stats = engine.stats()
    assert (stats.num_draft_tokens, stats.num_accepted_tokens) == (
        out.num_draft_tokens,
        out.num_accepted_tokens,
    )
    assert out.num_draft_tokens > out.num_accepted_tokens > 20


# Faults of the drafter


class BrokenDraft(ToyModel):
    def forward(self, batch: Batch, kv: KVCache) -> Tensor:
        raise RuntimeError("the draft is broken")


class NanDraft(ToyModel):
    """Loses its numbers after a while."""

    def forward(self, batch: Batch, kv: KVCache) -> Tensor:
        return super().forward(batch, kv) * (float("nan") if self.num_forwards > 5 else 1.0)


def test_a_draft_model_that_fails_costs_its_guesses_only(caplog: pytest.LogCaptureFixture):
    assert_same(run(new_engine(draft_model=BrokenDraft()), *mixed(3)), EXPECTED)
    assert "the drafter failed" in caplog.text


def test_a_draft_model_that_makes_no_numbers_guesses_nothing():
    assert_same(run(new_engine(draft_model=NanDraft()), *mixed(3)), EXPECTED)


def test_a_draft_model_of_another_vocabulary_is_refused():
    draft = ToyModel()
    draft.vocab_size = 40
    with pytest.raises(ValueError, match="knows 40 tokens and the model 64"):
        new_engine(draft_model=draft)


# Reports of users of other engines (engine-peers 6)


@pytest.mark.parametrize("how", ["ngram", "draft", "head"])
def test_report_20_no_token_from_outside_the_top_k(how: str):
    engine = speculating(how)
    items = [request(str(i), [1, 2] * 5, temperature=1.5, top_k=2, logprobs=2) for i in range(20)]
    for out in run(engine, *items).values():
        assert all(e.token_id in dict(e.top) for e in out.logprobs)


@pytest.mark.parametrize("how", ["ngram", "draft", "head"])
def test_report_21_the_seed_fixes_and_varies_the_text(how: str):
    seeds = [1, 1, 2, 3]
    items = [request(str(i), [1, 2] * 5, temperature=1.2, seed=s) for i, s in enumerate(seeds)]
    outputs = [tuple(out.token_ids) for out in run(speculating(how), *items).values()]
    assert outputs[0] == outputs[1]
    assert len(set(outputs)) == 3


@pytest.mark.parametrize("how", ["ngram", "draft", "head"])
def test_report_22_logprobs_are_those_without_guesses(how: str):
    item = request("a", [3, 1, 4, 1, 5] * 3, max_tokens=40, logprobs=1, frequency_penalty=-2.0)
    outputs = run(speculating(how), item)
    assert outputs["a"].num_accepted_tokens > 5
    assert_same(outputs, {"a": run(new_engine(), item)["a"]})


@pytest.mark.parametrize("how", ["ngram", "draft", "head"])
def test_report_23_rows_in_prefill_do_not_shift_the_logprobs(how: str):
    engine, (first, *others) = speculating(how, max_num_batched_tokens=8), mixed(7)
    engine.add(first)
    outputs: list[StepOutput] = []
    while engine.has_work:
        outputs += engine.step()
        if others:
            engine.add(others.pop(0))
    whole: dict[str, list[float]] = {}
    for out in outputs:
        whole.setdefault(out.request_id, []).extend(e.logprob for e in out.logprobs)
    for key, values in whole.items():
        assert np.allclose(values, [e.logprob for e in EXPECTED[key].logprobs], atol=1e-3)


@pytest.mark.parametrize("how", ["ngram", "draft", "head"])
def test_report_26_one_long_sequence_does_not_spoil_the_others(how: str):
    def acceptance(*neighbours: GenerationRequest) -> float:
        engine = speculating(how, ToyModel(max_position=512))
        item = request("a", [3, 1, 4, 1, 5] * 3, max_tokens=60, frequency_penalty=-2.0)
        out = run(engine, *neighbours, item)["a"]
        return out.num_accepted_tokens / max(1, out.num_draft_tokens)

    long = request("long", [1, 2, 3] * 100, max_tokens=60)
    assert acceptance(long) > 0.5 * acceptance() > 0.1


@pytest.mark.parametrize("how", ["ngram", "draft", "head"])
def test_report_27_guesses_of_a_skipped_step_are_forgotten(how: str):
    engine = speculating(how)
    engine.add(request("a", [3, 1, 4, 1, 5] * 3, max_tokens=40))
    for _ in range(5):
        engine.step()
    (item,) = engine._scheduler.running
    engine._speculator.plan([item])  # pyright: ignore[reportOptionalMemberAccess]
    engine._scheduler._preempt(item)
    assert (item.drafts.token_ids, item.drafts.num_granted) == ([], 0)
    want = run(new_engine(), request("a", [3, 1, 4, 1, 5] * 3, max_tokens=40))["a"]
    before = item.output_ids
    assert before + run(engine)["a"].token_ids == want.token_ids
