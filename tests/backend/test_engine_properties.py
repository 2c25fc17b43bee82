"""Whatever arrives, in whatever order and however it leaves: what must hold of every answer and of the engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.engine.engine import LLMEngine
from backend.engine.params import GenerationRequest, RequestClass, StepOutput
from tests.backend.toy_model import EOS, PIECES, ToyModel, new_engine, request, run

pytestmark = pytest.mark.usefixtures("one_thread")
MODEL, DRAFT = ToyModel(), ToyModel(seed=1)
MAX_STEPS = 3000
STOPS = ["A", "a", "~", "é", "the ", "\ufffd", "Bc", "~~~", " "]


@dataclass(frozen=True)
class Visit:
    """A request, the step before which it comes, and the one before which it is aborted, if it is."""

    item: GenerationRequest
    arrives: int
    leaves: int | None


@st.composite
def params(draw: st.DrawFn) -> dict[str, Any]:
    chosen: dict[str, Any] = {
        "temperature": draw(st.sampled_from([0.0, 0.7, 1.5])),
        "max_tokens": draw(st.sampled_from([1, 2, 5, 12, 12, 12])),
        "ignore_eos": draw(st.booleans()),
        "logprobs": draw(st.sampled_from([None, 0, 2])),
    }
    optional = {
        "seed": st.integers(-(2**63), 2**63 - 1),
        "stop": st.lists(st.sampled_from(STOPS), max_size=3).map(tuple),
        "stop_token_ids": st.lists(st.integers(0, 63), max_size=20).map(tuple),
        "prompt_logprobs": st.integers(0, 2),
        "presence_penalty": st.sampled_from([-2.0, 1.0]),
        "frequency_penalty": st.sampled_from([-1.0, 0.5]),
        "repetition_penalty": st.sampled_from([0.5, 1.4]),
        "logit_bias": st.dictionaries(st.integers(0, 63), st.sampled_from([-100.0, 5.0])),
        "top_p": st.sampled_from([0.0, 0.5]),
        "top_k": st.integers(1, 5),
        "min_p": st.just(0.1),
    }
    for name in draw(st.sets(st.sampled_from(sorted(optional)), max_size=4)):
        chosen[name] = draw(optional[name])
    if chosen.get("prompt_logprobs") is not None and draw(st.booleans()):
        chosen["max_tokens"] = 0
    return chosen


@st.composite
def visits(draw: st.DrawFn) -> list[Visit]:
    """Up to six prompts, each with one to three choices that share it."""
    found: list[Visit] = []
    for index in range(draw(st.integers(1, 5))):
        prompt = draw(st.lists(st.integers(1, 4), min_size=1, max_size=18))
        klass, chosen = draw(st.sampled_from(RequestClass)), draw(params())
        arrives = draw(st.integers(0, 12))
        leaves = draw(st.none() | st.none() | st.integers(0, 25))
        for choice in range(draw(st.sampled_from([1, 1, 1, 3]))):
            settings = dict(chosen)
            if "seed" in settings:
                settings["seed"] = (settings["seed"] + choice) % 2**63
            item = request(f"{index}.{choice}", prompt, klass, **settings)
            found.append(Visit(item, arrives, leaves))
    return found


engines = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(8, 24),
        "max_num_seqs": st.integers(1, 6),
        "max_num_batched_tokens": st.sampled_from([1, 3, 8, 64]),
        "enable_prefix_cache": st.booleans(),
    },
    optional={"speculative": st.just("ngram"), "draft_model": st.sampled_from([MODEL, DRAFT])},
)


def follow(engine: LLMEngine, guests: list[Visit]) -> dict[str, list[StepOutput]]:
    """Step to the end of all visits -> each request's outputs. Nothing may come of one that has ended or left."""
    outputs: dict[str, list[StepOutput]] = {guest.item.request_id: [] for guest in guests}
    gone: set[str] = set()
    for step in range(MAX_STEPS):
        for guest in guests:
            if guest.arrives == step:
                engine.add(guest.item)
            if guest.leaves == step:
                engine.abort(guest.item.request_id)
                if guest.arrives <= step:
                    gone.add(guest.item.request_id)
        if not engine.has_work and step > 25:
            return outputs
        for out in engine.step():
            assert out.request_id not in gone, "something comes out behind the end"
            outputs[out.request_id].append(out)
            if out.finish_reason is not None:
                gone.add(out.request_id)
    raise AssertionError("the engine does not come to rest")


def decoded(item: GenerationRequest, out: StepOutput, token_ids: list[int]) -> str:
    """The text of all tokens at once, cut as the last output says it was."""
    ends = {*item.params.stop_token_ids} | (set() if item.params.ignore_eos else {EOS})
    shown = [token_id for token_id in token_ids if token_id not in ends]
    text = b"".join(PIECES[token_id] for token_id in shown).decode(errors="replace")
    if isinstance(out.stop_reason, str):
        end = min(text.index(s) + len(s) for s in item.params.stop if s in text)
        text = text[: end - len(out.stop_reason)]
    return text


def check_answer(item: GenerationRequest, pieces: list[StepOutput]) -> None:
    token_ids = [token_id for out in pieces for token_id in out.token_ids]
    last, chosen = pieces[-1], item.params
    assert "".join(out.text for out in pieces) == decoded(item, last, token_ids)
    assert last.num_output_tokens == len(token_ids) <= (chosen.max_tokens or 0)
    assert last.num_prompt_tokens == len(item.prompt_ids) > last.num_cached_tokens
    if last.finish_reason == "length":
        assert len(token_ids) == chosen.max_tokens
    assert not (isinstance(last.stop_reason, str) and last.stop_reason not in chosen.stop)
    check_logprobs(item, pieces, token_ids)


def check_logprobs(item: GenerationRequest, pieces: list[StepOutput], token_ids: list[int]) -> None:
    """An entry for each token that is text; those of the prompt at once, with the first output."""
    scored = [entry.token_id for out in pieces for entry in out.logprobs]
    ends = {*item.params.stop_token_ids} | (set() if item.params.ignore_eos else {EOS})
    wanted = [] if item.params.logprobs is None else [t for t in token_ids if t not in ends]
    assert scored == wanted
    num_prompt_entries = [len(out.prompt_logprobs) for out in pieces]
    whole = 0 if item.params.prompt_logprobs is None else len(item.prompt_ids)
    assert num_prompt_entries == [whole] + [0] * (len(pieces) - 1)


@settings(max_examples=40, deadline=None)
@given(visits(), engines)
def test_every_request_ends_once_with_the_text_of_its_tokens_and_right_counts(
    guests: list[Visit], config: dict[str, Any]
) -> None:
    engine = new_engine(MODEL, **config)
    outputs = follow(engine, guests)
    for guest in guests:
        pieces = outputs[guest.item.request_id]
        stayed = guest.leaves is None or guest.leaves < guest.arrives
        if stayed or (pieces and pieces[-1].finish_reason is not None):
            check_answer(guest.item, pieces)
    stats = engine.stats()
    assert stats.num_free_blocks == stats.num_blocks
    assert stats.num_running == stats.num_waiting == 0
    made = [out for pieces in outputs.values() for out in pieces]
    assert stats.num_output_tokens == sum(len(out.token_ids) for out in made)
    begun = [pieces[-1] for pieces in outputs.values() if pieces]
    assert stats.num_prompt_tokens == sum(out.num_prompt_tokens for out in begun)
    assert stats.num_cached_tokens == sum(out.num_cached_tokens for out in begun)
    assert stats.num_accepted_tokens <= stats.num_draft_tokens


@settings(max_examples=25, deadline=None)
@given(visits(), engines)
def test_greedy_and_seeded_requests_say_what_they_say_alone(
    guests: list[Visit], config: dict[str, Any]
) -> None:
    outputs = follow(new_engine(MODEL, **config), guests)
    for guest in guests:
        item = guest.item
        if item.params.seed is None and item.params.temperature > 0:
            continue
        want = run(new_engine(MODEL), item)[item.request_id]
        got = [token_id for out in outputs[item.request_id] for token_id in out.token_ids]
        assert got == want.token_ids[: len(got)]
        if guest.leaves is None:
            assert len(got) == len(want.token_ids)
