"""Guesses under a grammar: the answer is that without guesses (engine-peers 6, report 24)."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from backend.engine.engine import LLMEngine
from backend.engine.grammar_spec import GrammarSpec
from backend.engine.params import GenerationRequest, SamplingParams, StepOutput
from backend.engine.sampler import law
from backend.models.batch import Batch, KVCache
from backend.tool_formats import tool_format
from tests.backend.test_grammar import (
    COMPILER,
    MARK,
    TOKENIZER,
    NoisyModel,
    constrained,
    spec,
    start,
)
from tests.backend.test_rejection import p_value
from tests.backend.toy_model import new_engine, run

PEOPLE = spec(
    {
        "type": "array",
        "items": {
            "type": "object",
            "properties": {"ab": {"enum": ["a", "b"]}, "true": {"type": "boolean"}},
            "required": ["ab", "true"],
            "additionalProperties": False,
        },
        "minItems": 3,
        "maxItems": 4,
    }
)
CALLS = tool_format("<tool_call> tools", TOKENIZER).grammar(
    [{"function": {"name": "ab", "parameters": {"type": "object", "properties": {}}}}],
    ["ab"],
    parallel=True,
)


NO_CACHE: Any = None


class Shaken(NoisyModel):
    """The model with other noise on top: right often, not always."""

    def forward(self, batch: Batch, kv: KVCache) -> Tensor:
        noise = torch.randn(self.vocab_size, generator=torch.Generator().manual_seed(7))
        return super().forward(batch, kv) + 2 * noise


def speculating(how: str, **config: Any) -> LLMEngine:
    draft: Any = Shaken() if how == "draft" else None
    config = config if draft else {**config, "speculative": how}
    model: Any = NoisyModel()
    return new_engine(model, TOKENIZER, draft, **config)  # pyright: ignore[reportArgumentType]


def people(count: int, grammar: GrammarSpec = PEOPLE, **params: Any) -> list[GenerationRequest]:
    """Greedy and seeded requests in turn; some prompts hold what the grammar will ask for again."""
    prompts = ['[{"ab": "a", "true": true}, ', "hi", '{"ab": "b", "true": false']
    return [
        constrained(
            str(i),
            grammar,
            list(prompts[i % 3].encode()),
            **{"temperature": 0.8 * (i % 2), "seed": i, "logprobs": 2, "max_tokens": 100, **params},
        )
        for i in range(count)
    ]


def answers(engine: LLMEngine, items: list[GenerationRequest]) -> dict[str, Any]:
    def seen(out: StepOutput) -> tuple[Any, ...]:
        logprobs = [(e.token_id, round(e.logprob, 3)) for e in out.logprobs]
        return out.token_ids, out.text, out.finish_reason, logprobs

    return {key: seen(out) for key, out in run(engine, *items).items()}


@pytest.mark.parametrize("how", ["ngram", "draft"])
@pytest.mark.parametrize(
    ("prefix_cache", "budget", "num_blocks"),
    [(True, 4, 40), (True, 512, 256), (False, 512, 40)],
)
def test_report_24_guesses_do_not_change_the_answer(
    how: str, prefix_cache: bool, budget: int, num_blocks: int
) -> None:
    config = {
        "enable_prefix_cache": prefix_cache,
        "max_num_batched_tokens": budget,
        "num_blocks": num_blocks,
    }
    engine = speculating(how, **config)
    assert answers(engine, people(5)) == answers(speculating("off"), people(5))
    if budget == 512:
        assert engine.stats().num_accepted_tokens > 10


@pytest.mark.parametrize("how", ["ngram", "draft"])
@pytest.mark.parametrize(
    "params",
    [
        {"frequency_penalty": 0.7, "repetition_penalty": 1.2},
        {"top_p": 0.6},
        {"min_tokens": 30},
        {"max_tokens": 9},
        {"stop": ("true",)},
    ],
    ids="+".join,
)
def test_a_grammar_and_guesses_meet(how: str, params: dict[str, Any]) -> None:
    wanted = answers(speculating("off"), people(4, **params))
    assert answers(speculating(how), people(4, **params)) == wanted


@pytest.mark.parametrize("how", ["ngram", "draft"])
def test_forced_tool_calls_are_guessed_for(how: str) -> None:
    engine = speculating(how)
    wanted = answers(speculating("off"), people(4, CALLS))
    assert answers(engine, people(4, CALLS)) == wanted
    assert engine.stats().num_accepted_tokens > 10


@pytest.mark.parametrize("how", ["ngram", "draft"])
def test_a_grammar_that_begins_behind_a_marker_may_begin_among_guesses(how: str) -> None:
    def items() -> list[GenerationRequest]:
        made = people(3, logit_bias={ord("a"): 3.0})
        for item in made:
            item.grammar = start(PEOPLE, after=b"a")
        return made

    assert answers(speculating(how), items()) == answers(speculating("off"), items())


def test_what_the_grammar_leaves_no_choice_about_is_guessed() -> None:
    engine = speculating("ngram")
    out = run(engine, constrained("r", GrammarSpec("regex", "(ab|é)truetruetruetrue")))["r"]
    assert out.text.endswith("truetruetruetrue")
    assert out.num_draft_tokens > 0


def test_unseeded_draws_among_guesses_keep_the_law() -> None:
    """Chi-square of guessed tokens, given the one before each, against the model's own law under the mask."""
    engine, counts = speculating("draft", max_num_seqs=2), np.zeros((3, 256, 3))
    params = {"temperature": 2.0, "seed": None}
    items = [
        constrained(str(i), GrammarSpec("regex", "[ace]{3}"), [9], **params) for i in range(500)
    ]
    for out in run(engine, *items).values():
        for position in (1, 2):
            before = out.token_ids[position - 1]
            counts[position, before, "ace".index(out.text[position])] += 1
    assert engine.stats().num_draft_tokens > 300
    for position in (1, 2):
        before = int(counts[position].sum(1).argmax())
        row: Any = SimpleNamespace(
            logits_rows=torch.tensor([0]),
            positions=torch.tensor([position]),
            token_ids=torch.tensor([before]),
        )
        logits = NoisyModel().forward(row, NO_CACHE)[0, list(b"ace")].numpy()
        wanted = law(logits, SamplingParams(temperature=2.0))
        assert p_value(counts[position, before], wanted) > 0.01


# Masks


def mask(state: Any, guesses: tuple[int, ...] = ()) -> list[int]:
    logits = np.zeros(TOKENIZER.vocab_size, np.float32)
    state.apply(logits, guesses)
    return np.flatnonzero(logits == 0.0).tolist()


def test_a_mask_behind_guesses_is_the_mask_behind_these_tokens() -> None:
    ahead, there = start(PEOPLE), start(PEOPLE)
    guesses = list(b'[{"ab": "b')
    ahead.prepare(guesses)
    for index in range(len(guesses) + 1):
        assert mask(ahead, tuple(guesses[:index])) == mask(there)
        if index < len(guesses):
            there.accept(guesses[index])


@pytest.mark.parametrize("taken", [b'[{"ab', b'[\n  {"', b"[ {"])
def test_masks_follow_what_is_accepted_whatever_was_guessed(taken: bytes) -> None:
    state, plain = start(PEOPLE), start(PEOPLE)
    state.prepare(list(b'[{"ab": '))
    for token in taken:
        state.accept(token)
        plain.accept(token)
        assert mask(state) == mask(plain)
        state.prepare(list(b'"ab'))


def test_nothing_is_legal_behind_a_guess_that_is_not() -> None:
    state = start(PEOPLE)
    assert state.num_legal(list(b"[{x}")) == 2
    assert mask(state, tuple(b"[x")) == []
    assert mask(state) == mask(start(PEOPLE))


def test_looking_ahead_leaves_the_grammar_where_it_was() -> None:
    state = start(PEOPLE)
    state.prepare(list(b"[{"))
    state.prepare([MARK, 3])
    text = b'[{"ab":"a","true":true},{"ab":"a","true":true},{"ab":"b","true":false}]'
    for token in text:
        state.accept(token)
    assert json.loads(text)
    assert state.error == ""
    assert COMPILER.has(PEOPLE)
