"""The completions dialect: prompts of every form in, text and legacy logprobs out."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.endpoints.completions import CompletionsEndpoint
from plugins.errors import InvalidRequest, RateLimited, UpstreamUnavailable
from plugins.events import (
    Event,
    Finished,
    ReasoningDelta,
    Request,
    Started,
    TextDelta,
    TokenLogprob,
    Usage,
    Verbatim,
)
from tests.gateway.answers import read_stream

STARTED = Started("cmpl-7", "up-model", 1_700_000_000, "fp_1")
HELLO: list[Event] = [STARTED, TextDelta("Hel"), TextDelta("lo"), Finished("length")]
USAGE = Usage(prompt_tokens=5, completion_tokens=2)


def request_of(**fields: Any) -> Request:
    body = {"model": "m", "prompt": "hi"} | fields
    return CompletionsEndpoint().decode(json.dumps(body).encode(), "req_1", 0.0)


def refusal(**fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        request_of(**fields)
    assert caught.value.status == 400
    return caught.value


def streamed(request: Request, *events: Event) -> list[dict[str, Any]]:
    encoder = CompletionsEndpoint().stream_encoder(request)
    return read_stream(encoder.encode(list(events)) + encoder.end())


def collected(request: Request, *events: Event) -> dict[str, Any]:
    collector = CompletionsEndpoint().collector(request)
    collector.add(list(events))
    return json.loads(collector.body())


# -- Bodies ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("hi", ["hi"]),
        ("", [""]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
def test_prompts_are_text_or_token_ids_one_or_many(prompt: object, expected: list[Any]) -> None:
    request = request_of(prompt=prompt)
    assert (request.dialect, request.prompts) == ("completions", expected)


def test_16_tokens_are_the_default_and_null_is_the_default() -> None:
    assert [
        request_of(**fields).sampling.max_tokens
        for fields in ({}, {"max_tokens": None}, {"max_tokens": 0}, {"max_tokens": 7})
    ] == [16, 16, 0, 7]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (False, 0, False)),
        ({"logprobs": 0}, (True, 0, False)),
        ({"logprobs": 5}, (True, 5, False)),
        ({"logprobs": 1, "echo": True}, (True, 1, True)),
        ({"echo": True}, (False, 0, False)),
    ],
)
def test_logprobs_is_a_number_and_covers_an_echoed_prompt(
    fields: dict[str, Any], expected: tuple[bool, int, bool]
) -> None:
    sampling = request_of(**fields).sampling
    assert sampling.echo == fields.get("echo", False)
    assert (sampling.logprobs, sampling.top_logprobs, sampling.prompt_logprobs) == expected


def test_shared_fields_are_read_as_in_chat() -> None:
    request = request_of(
        stream=True,
        stream_options={"include_usage": True},
        temperature=0,
        top_k=1,
        stop="END",
        foo=1,
    )
    assert (request.stream, request.include_usage, request.extra) == (True, True, {"foo": 1})
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.stop) == (0, 1, ["END"])


def test_a_suffix_travels_as_extra() -> None:
    assert request_of(suffix=" The end.").extra == {"suffix": " The end."}
    assert request_of(suffix=None).extra == {}


def test_best_of_is_kept() -> None:
    assert request_of(best_of=3, n=2).sampling.best_of == 3
    assert request_of(best_of=1, stream=True).sampling.best_of == 1


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"prompt": None}, "prompt", "missing_required_parameter"),
        ({"prompt": []}, "prompt", "empty_array"),
        ({"prompt": [[1], []]}, "prompt[1]", "empty_array"),
        ({"prompt": {"a": 1}}, "prompt", "invalid_type"),
        ({"prompt": 5}, "prompt", "invalid_type"),
        ({"prompt": [1, "a"]}, "prompt", "invalid_type"),
        ({"prompt": ["a", [1]]}, "prompt", "invalid_type"),
        ({"prompt": [[1, "a"]]}, "prompt[0][1]", "invalid_type"),
        ({"prompt": [1.5]}, "prompt[0]", "invalid_type"),
        ({"prompt": [True]}, "prompt[0]", "invalid_type"),
        ({"prompt": [-1]}, "prompt[0]", "integer_below_min_value"),
        ({"prompt": [[2**40]]}, "prompt[0][0]", "integer_above_max_value"),
        ({"max_tokens": -1}, "max_tokens", "integer_below_min_value"),
        ({"logprobs": 6}, "logprobs", "integer_above_max_value"),
        ({"logprobs": True}, "logprobs", "invalid_type"),
        ({"best_of": 1, "n": 2}, "best_of", "invalid_value"),
        ({"best_of": 21}, "best_of", "integer_above_max_value"),
        ({"best_of": 2, "stream": True}, "best_of", "invalid_value"),
        ({"temperature": 3}, "temperature", "decimal_above_max_value"),
        ({"stream_options": {"include_usage": True}}, "stream_options", None),
        ({"model": None}, None, None),
    ],
    ids=lambda value: json.dumps(value)[:60],
)
def test_a_bad_value_is_refused_with_its_place_and_code(
    fields: dict[str, Any], param: str | None, code: str | None
) -> None:
    error = refusal(**fields)
    assert (error.param, error.code) == (param, code)


# -- Answers ---------------------------------------------------------------------------------------------------------


def test_a_stream_is_pieces_of_text_and_a_finish() -> None:
    chunks = streamed(request_of(stream=True), *HELLO, USAGE)
    assert [chunk["choices"] for chunk in chunks] == [
        [{"text": text, "index": 0, "logprobs": None, "finish_reason": reason}]
        for text, reason in [("Hel", None), ("lo", None), ("", "length")]
    ]
    heads = [{k: v for k, v in chunk.items() if k != "choices"} for chunk in chunks]
    assert heads == [
        {
            "id": "cmpl-7",
            "object": "text_completion",
            "created": 1_700_000_000,
            "model": "up-model",
            "system_fingerprint": "fp_1",
        }
    ] * len(chunks)


def test_neither_empty_text_nor_what_follows_an_end_makes_a_chunk() -> None:
    events = [*HELLO[:2], TextDelta(""), *HELLO[2:], TextDelta("late"), Finished("stop")]
    request = request_of(stream=True)
    assert streamed(request, *events) == streamed(request, *HELLO)
    assert collected(request_of(), *events) == collected(request_of(), *HELLO)


def test_usage_comes_last_with_no_choices_if_asked_for() -> None:
    request = request_of(stream=True, stream_options={"include_usage": True})
    *chunks, last = streamed(request, *HELLO, USAGE)
    assert [chunk["usage"] for chunk in chunks] == [None] * 3
    assert (last["choices"], last["usage"]["total_tokens"]) == ([], 7)


def test_a_whole_answer() -> None:
    answer = collected(request_of(), *HELLO, USAGE)
    assert answer.pop("usage")["total_tokens"] == 7
    assert answer == {
        "id": "cmpl-7",
        "object": "text_completion",
        "created": 1_700_000_000,
        "model": "up-model",
        "system_fingerprint": "fp_1",
        "choices": [{"text": "Hello", "index": 0, "logprobs": None, "finish_reason": "length"}],
    }


def test_an_id_that_is_missing_is_made_in_the_dialects_form() -> None:
    assert collected(request_of(), *HELLO[1:])["id"] == "cmpl-1"


def test_choices_of_several_prompts_stand_in_order() -> None:
    events = [event for i in (3, 1, 0, 2) for event in (TextDelta(f"t{i}", i), Finished("stop", i))]
    choices = collected(request_of(prompt=["a", "b"], n=2), *events)["choices"]
    assert [(choice["index"], choice["text"]) for choice in choices] == [
        (i, f"t{i}") for i in range(4)
    ]


def test_several_prompts_are_several_choices_in_verbatim_bytes() -> None:
    piece = b'data: {"choices":[{"index":1,"text":"b"}]}\n\n'
    request = request_of(prompt=["a", "b"], stream=True)
    encoder = CompletionsEndpoint().stream_encoder(request)
    encoder.encode([STARTED, Verbatim(piece), Finished("stop")])
    assert not encoder.finished
    encoder.encode([Finished("stop", 1)])
    assert encoder.finished


def test_reasoning_is_not_text() -> None:
    events = [STARTED, ReasoningDelta("Hm"), *HELLO[1:]]
    assert collected(request_of(), *events) == collected(request_of(), *HELLO)
    assert streamed(request_of(stream=True), *events) == streamed(request_of(stream=True), *HELLO)


def test_legacy_logprobs_are_four_lists() -> None:
    top = [TokenLogprob("lo", -0.1), TokenLogprob("p", -3.0)]
    events = [
        STARTED,
        TextDelta("Hel", logprobs=(TokenLogprob("Hel", math.nan),)),
        TextDelta(
            "lo x", logprobs=(TokenLogprob("lo", -0.1, top=top), TokenLogprob(" x", -math.inf))
        ),
        Finished("stop"),
    ]
    expected = {
        "tokens": ["Hel", "lo", " x"],
        "token_logprobs": [None, -0.1, -9999.0],
        "top_logprobs": [None, {"lo": -0.1, "p": -3.0}, {" x": -9999.0}],
        "text_offset": [0, 3, 5],
    }
    request = request_of(logprobs=2, stream=True)
    assert collected(request, *events)["choices"][0]["logprobs"] == expected
    pieces = [chunk["choices"][0]["logprobs"] for chunk in streamed(request, *events)][:-1]
    assert {key: [x for piece in pieces for x in piece[key]] for key in expected} == expected


def test_offsets_that_the_provider_gives_are_kept() -> None:
    delta = TextDelta("b", logprobs=(TokenLogprob("b", -1.0),), text_offsets=(40,))
    answer = collected(request_of(logprobs=1), delta, Finished("stop"))
    assert answer["choices"][0]["logprobs"]["text_offset"] == [40]


def test_logprobs_are_null_unless_asked_for() -> None:
    delta = TextDelta("b", logprobs=(TokenLogprob("b", -1.0),))
    assert collected(request_of(), delta, Finished("stop"))["choices"][0]["logprobs"] is None


def test_an_answer_without_its_end_is_not_passed_off_as_whole() -> None:
    encoder = CompletionsEndpoint().stream_encoder(request_of(stream=True))
    encoder.encode(HELLO[:-1])
    with pytest.raises(UpstreamUnavailable):
        encoder.end()
    collector = CompletionsEndpoint().collector(request_of())
    collector.add(HELLO[:-1])
    with pytest.raises(UpstreamUnavailable):
        collector.body()


def test_an_error_closes_the_stream() -> None:
    encoder = CompletionsEndpoint().stream_encoder(request_of(stream=True))
    sent = encoder.encode(HELLO[:2]) + encoder.error(RateLimited("slow down"))
    assert read_stream(sent)[-1]["error"]["message"] == "slow down"


def test_the_official_clients_types_take_both_forms() -> None:
    from openai.types import Completion

    events = [STARTED, TextDelta("a", logprobs=(TokenLogprob("a", -0.5),)), *HELLO[1:], USAGE]
    final = streamed(request_of(stream=True, logprobs=1), *events)[-1]
    Completion.model_validate(final, strict=True)
    Completion.model_validate(collected(request_of(logprobs=1), *events), strict=True)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=10,
)


@given(JSON, st.dictionaries(st.sampled_from(["n", "echo", "logprobs", "best_of", "x"]), JSON))
def test_any_json_gives_a_request_or_a_refusal(prompt: object, fields: dict[str, Any]) -> None:
    try:
        assert request_of(prompt=prompt, **fields).prompts
    except InvalidRequest as error:
        assert error.status == 400


@given(st.lists(st.builds(TextDelta, st.text(max_size=6), st.integers(0, 2)), max_size=12))
def test_a_stream_joined_is_the_whole_answer(content: list[Event]) -> None:
    events = [STARTED, *content, *[Finished("stop", choice) for choice in range(3)]]
    request = request_of(prompt=["a", "b", "c"], stream=True)
    texts = ["", "", ""]
    for chunk in streamed(request, *events):
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == [choice["text"] for choice in collected(request, *events)["choices"]]
