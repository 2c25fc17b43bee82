"""Reports of users of other engines about log-probabilities, seeds and guesses, each driven through ours."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from backend.engine.engine import LLMEngine
from backend.engine.grammar import GrammarCompiler
from backend.engine.grammar_spec import GrammarSpec
from backend.engine.params import GenerationRequest, RequestClass, StepOutput
from tests.backend.real_engine import TIERS, llama_engine, loaded
from tests.backend.toy_model import ToyModel, new_engine, request, run

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPT = [3 + (5 * i) % 200 for i in range(21)]
HOW = [{"speculative": "ngram"}, {"draft_seed": 0}, {"draft_seed": 1}]
HOW_IDS = ["ngram", "a perfect draft", "a strange draft"]


@pytest.mark.parametrize("how", HOW, ids=HOW_IDS)
def test_report_21_vllm_13196_a_seed_fixes_and_varies_output_with_speculation_on(
    how: dict[str, Any],
) -> None:
    seeds = [1, 1, 2, 3]
    items = [
        request(str(i), PROMPT, temperature=1.0, seed=seed, max_tokens=24)
        for i, seed in enumerate(seeds)
    ]
    first, again, *others = [
        tuple(out.token_ids) for out in run(llama_engine(**how), *items).values()
    ]
    assert first == again
    assert len({first, *others}) == 3
    assert first == tuple(run(llama_engine(), items[0])["0"].token_ids)


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["get_weather", "get_time"]},
        "arguments": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 6}, "days": {"type": "integer"}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "arguments"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("how", HOW, ids=HOW_IDS)
@pytest.mark.parametrize("seed", range(3))
def test_report_24_vllm_9423_guesses_leave_a_structured_answer_as_it_is(
    how: dict[str, Any], seed: int
) -> None:
    compiler = GrammarCompiler(loaded().tokenizer)
    prompt = list(loaded().tokenizer.encode('{"name":"get_weather","arguments":{"city":"'))

    def answer(engine: LLMEngine) -> StepOutput:
        params = {"temperature": 0.8 * (seed > 0), "seed": seed, "max_tokens": 80}
        item = request("a", prompt, ignore_eos=False, **params)
        item.grammar = compiler.compile(GrammarSpec("json_schema", json.dumps(SCHEMA))).start()
        return run(engine, item)["a"]

    out, want = answer(llama_engine(**how)), answer(llama_engine())
    assert (out.token_ids, out.text, out.finish_reason) == (
        want.token_ids,
        want.text,
        want.finish_reason,
    )
    if out.finish_reason == "stop":
        assert set(json.loads(out.text)) == {"name", "arguments"}


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("how", HOW, ids=HOW_IDS)
def test_report_25_trt_llm_17110_steps_of_several_rows_write_keys_where_steps_of_one_do(
    how: dict[str, Any], tier: str
) -> None:
    """The report is about a captured graph; what is checked here is the same promise of our verify steps."""
    item = request("a", PROMPT * 2, max_tokens=60, logprobs=1, frequency_penalty=-1.0)
    engine = llama_engine(tier, **how)
    out, want = run(engine, item)["a"], run(llama_engine(tier), item)["a"]
    assert engine.stats().num_draft_tokens > 0
    assert out.token_ids == want.token_ids
    assert np.allclose(
        [e.logprob for e in out.logprobs], [e.logprob for e in want.logprobs], atol=1e-3
    )


# Log-probabilities


@pytest.mark.parametrize("params", [{"top_p": 0.5}, {"top_k": 1}, {"temperature": 1.9}, {}])
def test_report_28_vllm_9453_logprobs_are_of_the_raw_logits_with_all_entries(
    params: dict[str, Any],
) -> None:
    greedy = run(new_engine(), request("a", [1, 2, 3], max_tokens=1, logprobs=3))["a"].logprobs[0]
    item = request("a", [1, 2, 3], max_tokens=1, logprobs=3, **{"temperature": 1.0, **params})
    entry = run(new_engine(), item)["a"].logprobs[0]
    assert entry.top == greedy.top
    assert len(entry.top) == 3
    assert all(logprob < 0.0 for _, logprob in entry.top)


# Seeds


@pytest.mark.parametrize("tier", TIERS)
def test_report_39_vllm_51226_a_seeded_request_beside_unseeded_ones_keeps_its_text(
    tier: str,
) -> None:
    seeded = request("seeded", PROMPT, temperature=1.0, seed=11, max_tokens=24)
    want = run(llama_engine(tier), seeded)["seeded"].token_ids
    for count in (1, 4, 13):
        crowd = [
            request(str(i), PROMPT[i:], temperature=1.0, max_tokens=20 + i) for i in range(count)
        ]
        outputs = run(llama_engine(tier), *crowd[::2], seeded, *crowd[1::2])
        assert outputs["seeded"].token_ids == want


def test_report_40_vllm_19940_preemption_does_not_restart_the_seed() -> None:
    item = request("a", [1, 2, 3], RequestClass.BATCH, temperature=1.3, seed=5, max_tokens=30)
    want = run(new_engine(), item)["a"].token_ids
    engine = new_engine(max_num_seqs=1)
    engine.add(item)
    got: list[int] = []
    for step in range(1000):
        if not engine.has_work:
            break
        if step % 7 == 5:
            engine.add(request(str(step), [9], RequestClass.INTERACTIVE, max_tokens=1))
        got += [t for out in engine.step() if out.request_id == "a" for t in out.token_ids]
    assert engine.stats().num_preemptions > 3
    assert got == want


def crowd_of(count: int) -> list[GenerationRequest]:
    return [
        request(str(i), PROMPT[: 1 + i % 20], temperature=0.9, seed=i, max_tokens=8, logprobs=2)
        for i in range(count)
    ]


@pytest.mark.parametrize("tier", TIERS[1:])
def test_report_41_vllm_51187_on_the_native_tier_no_bit_depends_on_44_neighbours(tier: str) -> None:
    target = request("target", PROMPT, max_tokens=16, logprobs=5)
    config = {"max_num_seqs": 64, "num_blocks": 256, "enable_prefix_cache": False}
    seen = {
        tuple(run(llama_engine(tier, **config), *crowd_of(count), target)["target"].logprobs)
        for count in (0, 1, 7, 44)
    }
    assert len(seen) == 1


def test_report_42_mlx_vlm_1818_requests_without_a_seed_differ_one_after_another_too() -> None:
    """With the entropy of the system, as in production."""
    engine = LLMEngine(ToyModel(), new_engine()._tokenizer, new_engine()._config, clock=lambda: 0.0)
    texts = [
        tuple(run(engine, request("a", [1, 2], temperature=1.5, max_tokens=20))["a"].token_ids)
        for _ in range(4)
    ]
    assert len(set(texts)) == 4
