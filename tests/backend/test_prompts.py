from __future__ import annotations

from typing import Any

import pytest

from backend.chat_reader import chat_reader
from backend.engine.params import EmbeddingParams, Objective, RequestClass, SamplingParams
from backend.prompts import INLINE_CHARS, Prompt, PromptReader, Refused, make_rows
from backend.protocol import Generate
from tests.backend.toy_worker import BOS, ToyTemplate, ToyTemplateError, ToyTokenizer


def reader(template: ToyTemplate | None = None, max_model_len: int = 100) -> PromptReader:
    chat = template and chat_reader(template, ToyTemplateError, ToyTokenizer())
    return PromptReader(ToyTokenizer(), chat, max_model_len, vocab_size=257)


def read(generate: Generate, **kwargs: Any) -> list[Prompt]:
    return reader(**kwargs).read(generate)


def test_a_completion_begins_as_the_model_wants_it_to() -> None:
    (prompt,) = read(Generate(1, SamplingParams(), prompts=["ab"]))
    assert (prompt.token_ids, prompt.text) == ([BOS, 97, 98], "ab")


def test_token_ids_are_taken_as_they_are_and_their_text_is_known() -> None:
    (prompt,) = read(Generate(1, SamplingParams(), prompts=[[BOS, 97]]))
    assert (prompt.token_ids, prompt.text) == ([BOS, 97], "a")


def test_a_model_without_a_template_refuses_a_chat_and_says_what_to_do() -> None:
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises(Refused, match="set `template`") as refused:
        read(Generate(1, SamplingParams(), messages=messages))
    assert refused.value.param == "messages"


def test_a_prompt_that_just_fits_leaves_room_for_one_token() -> None:
    (prompt,) = read(Generate(1, SamplingParams(), prompts=["x" * 98]), max_model_len=100)
    assert len(prompt.token_ids) == 99
    with pytest.raises(Refused, match="resulted in 100 tokens"):
        read(Generate(1, SamplingParams(), prompts=["x" * 99]), max_model_len=100)


def embed(*texts: str | list[int]) -> Generate:
    return Generate(1, SamplingParams(), prompts=[*texts], embedding=EmbeddingParams(3))


def test_a_text_to_embed_may_fill_the_context_and_the_one_that_does_not_fit_is_named() -> None:
    (prompt,) = read(embed("x" * 99), max_model_len=100)
    assert len(prompt.token_ids) == 100
    with pytest.raises(
        Refused, match=r"your input\[1\] resulted in 101 tokens\. Please"
    ) as refused:
        read(embed("x", "x" * 100), max_model_len=100)
    assert (refused.value.param, refused.value.code) == ("input[1]", "context_length_exceeded")


def test_token_ids_to_embed_are_checked_by_their_input() -> None:
    with pytest.raises(Refused, match=r"input\[1\] holds token id 257") as refused:
        read(embed([1], [257]))
    assert refused.value.param == "input[1]"
    with pytest.raises(Refused, match="input holds token id 257"):
        read(embed([257]))


def test_every_row_of_a_request_to_embed_wants_its_vector() -> None:
    generate = embed("a", "b")
    rows = make_rows(generate, read(generate), "1:")
    assert [(row.request_id, row.embedding) for row in rows] == [
        ("1:0", EmbeddingParams(3)),
        ("1:1", EmbeddingParams(3)),
    ]


def test_a_template_that_knows_developers_sees_them() -> None:
    template = ToyTemplate()
    template.text = "{% if role == 'developer' %}"
    messages = [{"role": "developer", "content": "x"}]
    (prompt,) = read(Generate(1, SamplingParams(), messages=messages), template=template)
    assert prompt.text == "developer:x>"


@pytest.mark.parametrize(
    ("generate", "long"),
    [
        (Generate(1, SamplingParams(), prompts=["x" * INLINE_CHARS]), False),
        (Generate(1, SamplingParams(), prompts=["x" * INLINE_CHARS, "y"]), True),
        (Generate(1, SamplingParams(), messages=[{"role": "user", "content": "hi"}] * 5), False),
        (Generate(1, SamplingParams(), messages=[{"role": "user", "content": ""}] * 100), True),
    ],
    ids=["short texts", "long texts", "few messages", "many messages"],
)
def test_prompts_that_take_long_to_read_are_known_beforehand(
    generate: Generate, long: bool
) -> None:
    assert reader().is_long(generate) is long


def test_choices_of_one_seed_draw_differently_and_prompts_alike() -> None:
    generate = Generate(1, SamplingParams(seed=7), prompts=["a", "b"], n=2)
    rows = make_rows(generate, read(generate), "s:")
    assert [row.request_id for row in rows] == ["s:0", "s:1", "s:2", "s:3"]
    assert [row.params.seed for row in rows] == [7, 8, 7, 8]


def test_every_choice_has_the_class_and_the_objective_of_its_request() -> None:
    objective = Objective(400.0, 50.0)
    generate = Generate(
        1, SamplingParams(), prompts=["a"], n=2, klass=RequestClass.FLEX, objective=objective
    )
    rows = make_rows(generate, read(generate), "")
    assert [(row.klass, row.objective) for row in rows] == [(RequestClass.FLEX, objective)] * 2


def test_the_largest_seed_has_a_next_one() -> None:
    generate = Generate(1, SamplingParams(seed=2**63 - 1), prompts=["a"], n=2)
    assert make_rows(generate, read(generate), "")[1].params.seed == -(2**63)


def test_choices_without_a_seed_are_left_to_chance() -> None:
    generate = Generate(1, SamplingParams(), prompts=["a"], n=2)
    assert [row.params.seed for row in make_rows(generate, read(generate), "")] == [None, None]
