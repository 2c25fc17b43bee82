"""Events -> chat answers: streams that are well-formed whatever comes, and whole answers that say the same."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.endpoints.chat import ChatEndpoint
from plugins.errors import RateLimited, UpstreamError, UpstreamUnavailable
from plugins.events import (
    Event,
    Failed,
    Finished,
    ReasoningDelta,
    RefusalDelta,
    Request,
    Started,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    Usage,
    Verbatim,
)
from tests.gateway.answers import join_chat, read_stream
from tests.gateway.chat_bodies import chat_request

STARTED = Started("chatcmpl-7", "up-model", 1_700_000_000, "fp_1")
HELLO: list[Event] = [STARTED, TextDelta("Hel"), TextDelta("lo"), Finished("stop")]
USAGE = Usage(prompt_tokens=5, completion_tokens=2, cached_tokens=4, reasoning_tokens=1)
USAGE_JSON = {
    "prompt_tokens": 5,
    "completion_tokens": 2,
    "total_tokens": 7,
    "prompt_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0, "audio_tokens": 0},
    "completion_tokens_details": {
        "reasoning_tokens": 1,
        "accepted_prediction_tokens": 0,
        "rejected_prediction_tokens": 0,
        "audio_tokens": 0,
    },
}
CALL: list[Event] = [
    ToolCallDelta(0, id="call_1", name="f"),
    ToolCallDelta(0, arguments='{"a"'),
    ToolCallDelta(0, arguments=":1}"),
    Finished("tool_calls"),
]


def streamed(request: Request, *batches: list[Event]) -> bytes:
    encoder = ChatEndpoint().stream_encoder(request)
    return b"".join(encoder.encode(batch) for batch in batches) + encoder.end()


def chunks_of(*events: Event, **fields: Any) -> list[dict[str, Any]]:
    return read_stream(streamed(chat_request(stream=True, **fields), list(events)))


def deltas_of(*events: Event, **fields: Any) -> list[dict[str, Any]]:
    return [c["choices"][0]["delta"] for c in chunks_of(*events, **fields) if c["choices"]]


def collected(request: Request, *events: Event) -> dict[str, Any]:
    collector = ChatEndpoint().collector(request)
    collector.add(list(events))
    return json.loads(collector.body())


# -- Streams ---------------------------------------------------------------------------------------------------------


def test_a_stream_is_role_then_content_then_finish() -> None:
    chunks = chunks_of(*HELLO)
    assert [chunk["choices"] for chunk in chunks] == [
        [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}]
        for delta, reason in [
            ({"role": "assistant", "content": "", "refusal": None}, None),
            ({"content": "Hel"}, None),
            ({"content": "lo"}, None),
            ({}, "stop"),
        ]
    ]


def test_every_chunk_repeats_the_head() -> None:
    heads = [{k: v for k, v in chunk.items() if k != "choices"} for chunk in chunks_of(*HELLO)]
    assert heads == [
        {
            "id": "chatcmpl-7",
            "object": "chat.completion.chunk",
            "created": 1_700_000_000,
            "model": "up-model",
            "system_fingerprint": "fp_1",
        }
    ] * len(heads)


def test_the_tier_that_was_used_is_shown() -> None:
    started = Started("id", "m", 1, service_tier="default")
    assert {c["service_tier"] for c in chunks_of(started, *HELLO[1:])} == {"default"}
    assert collected(chat_request(), started, *HELLO[1:])["service_tier"] == "default"


@pytest.mark.parametrize("tier", ["auto", "flex", "priority"])
def test_a_tier_asked_for_in_vain_is_answered_as_the_default_one(tier: str) -> None:
    assert {c["service_tier"] for c in chunks_of(*HELLO, service_tier=tier)} == {"default"}
    assert collected(chat_request(service_tier=tier), *HELLO)["service_tier"] == "default"


def test_a_missing_start_is_made_up_once() -> None:
    chunks = chunks_of(*HELLO[1:])
    assert {chunk["id"] for chunk in chunks} == {"chatcmpl-1"}
    assert {chunk["model"] for chunk in chunks} == {"m"}
    assert len({chunk["created"] for chunk in chunks}) == 1


def test_a_second_start_changes_nothing() -> None:
    chunks = chunks_of(STARTED, TextDelta("a"), Started("other", "x", 1), Finished("stop"))
    assert {chunk["id"] for chunk in chunks} == {"chatcmpl-7"}


def test_choices_interleave_each_with_its_own_role_and_end() -> None:
    events = [
        STARTED,
        TextDelta("a"),
        TextDelta("x", 1),
        TextDelta("b"),
        Finished("stop", 1),
        TextDelta("c"),
        Finished("length"),
    ]
    joined = join_chat(chunks_of(*events, n=2))
    assert {i: (c["message"]["content"], c["finish_reason"]) for i, c in joined.items()} == {
        0: ("abc", "length"),
        1: ("x", "stop"),
    }
    assert all(choice["message"]["role"] == "assistant" for choice in joined.values())


def test_nothing_follows_the_end_of_a_choice() -> None:
    late = [TextDelta("late"), Finished("length"), ToolCallDelta(0, id="x", name="y")]
    assert chunks_of(*HELLO, *late) == chunks_of(*HELLO)


def test_an_empty_answer_still_has_its_role() -> None:
    assert deltas_of(STARTED, Finished("stop")) == [
        {"role": "assistant", "content": "", "refusal": None},
        {},
    ]


def test_empty_text_makes_no_chunk() -> None:
    assert chunks_of(STARTED, TextDelta("Hel"), TextDelta(""), *HELLO[2:]) == chunks_of(*HELLO)


def test_usage_comes_last_with_no_choices_if_asked_for() -> None:
    chunks = chunks_of(
        STARTED, Usage(9, 9), *HELLO[1:], USAGE, stream_options={"include_usage": True}
    )
    assert [chunk["usage"] for chunk in chunks] == [None] * 4 + [USAGE_JSON]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["id"] == "chatcmpl-7"


def test_usage_is_not_spoken_of_unless_asked_for() -> None:
    for chunk in chunks_of(*HELLO, USAGE):
        assert "usage" not in chunk
        assert chunk["choices"]


def test_unknown_usage_makes_no_usage_chunk() -> None:
    chunks = chunks_of(*HELLO, stream_options={"include_usage": True})
    assert [chunk["usage"] for chunk in chunks] == [None] * 4


def test_a_call_shows_id_type_and_name_once_first() -> None:
    assert deltas_of(STARTED, *CALL) == [
        {"role": "assistant", "content": None, "refusal": None},
        {
            "tool_calls": [
                {
                    "index": 0,
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "f", "arguments": ""},
                }
            ]
        },
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a"'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": ":1}"}}]},
        {},
    ]


def test_an_id_and_name_that_come_again_are_left_out() -> None:
    again = ToolCallDelta(0, id="call_1", name="f", arguments="{}")
    assert deltas_of(STARTED, CALL[0], again, CALL[-1])[2] == {
        "tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]
    }


def test_a_call_without_an_id_gets_one() -> None:
    first = deltas_of(STARTED, ToolCallDelta(0, name="f", arguments="{}"), CALL[-1])[1]
    call_id = first["tool_calls"][0]["id"]
    assert call_id.startswith("call_")
    assert len(call_id) == 29
    assert call_id.isascii()
    assert call_id.removeprefix("call_").isalnum()


def test_old_clients_get_a_function_call() -> None:
    fields: dict[str, Any] = {"functions": [{"name": "f"}]}
    joined = join_chat(chunks_of(STARTED, *CALL, **fields))[0]
    assert joined["message"]["function_call"] == {"name": "f", "arguments": '{"a":1}'}
    assert "tool_calls" not in joined["message"]
    assert joined["finish_reason"] == "function_call"
    choice = collected(chat_request(**fields), STARTED, *CALL)["choices"][0]
    assert choice["message"]["function_call"] == {"name": "f", "arguments": '{"a":1}'}
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "function_call"


def test_reasoning_goes_beside_the_content_and_its_signature_into_a_block() -> None:
    events = [
        ReasoningDelta("Think "),
        ReasoningDelta("hard."),
        ReasoningDelta(signature="c2ln"),
        ReasoningDelta(redacted="UkVE"),
        TextDelta("42"),
        Finished("stop"),
    ]
    message = join_chat(chunks_of(STARTED, *events))[0]["message"]
    assert message["content"] == "42"
    assert message["reasoning_content"] == "Think hard."
    assert message["thinking_blocks"] == [
        {"type": "thinking", "thinking": "Think hard.", "signature": "c2ln"},
        {"type": "redacted_thinking", "data": "UkVE"},
    ]


def test_a_thought_signature_travels_with_its_call() -> None:
    call = ToolCallDelta(0, id="call_1", name="f", arguments="{}", signature="c2ln")
    expected = {"google": {"thought_signature": "c2ln"}}
    delta = deltas_of(STARTED, call, Finished("tool_calls"))[1]
    assert delta["tool_calls"][0]["extra_content"] == expected
    message = collected(chat_request(), call, Finished("tool_calls"))["choices"][0]["message"]
    assert message["tool_calls"][0]["extra_content"] == expected


def test_logprobs_stand_beside_their_text() -> None:
    top = [TokenLogprob(" a", -0.5, [32, 97]), TokenLogprob(" b", -math.inf, [32, 98])]
    logprob = TokenLogprob(" a", -0.5, [32, 97], top)
    events = [STARTED, TextDelta(" a", logprobs=(logprob,)), Finished("stop")]
    expected = {
        "token": " a",
        "logprob": -0.5,
        "bytes": [32, 97],
        "top_logprobs": [
            {"token": " a", "logprob": -0.5, "bytes": [32, 97]},
            {"token": " b", "logprob": -9999.0, "bytes": [32, 98]},
        ],
    }
    fields: dict[str, Any] = {"logprobs": True, "top_logprobs": 2}
    choice = chunks_of(*events, **fields)[1]["choices"][0]
    assert choice["logprobs"] == {"content": [expected], "refusal": None}
    whole = collected(chat_request(**fields), *events)["choices"][0]
    assert whole["logprobs"] == {"content": [expected], "refusal": None}


def test_logprobs_are_null_unless_asked_for() -> None:
    events = [STARTED, TextDelta("a", logprobs=(TokenLogprob("a", -0.5),)), Finished("stop")]
    assert {str(c["choices"][0]["logprobs"]) for c in chunks_of(*events)} == {"None"}
    assert collected(chat_request(), *events)["choices"][0]["logprobs"] is None


def test_an_error_is_one_event_and_closes_the_stream() -> None:
    encoder = ChatEndpoint().stream_encoder(chat_request(stream=True))
    sent = encoder.encode(HELLO[:2]) + encoder.error(RateLimited('Slow\n"down"'))
    *chunks, error = read_stream(sent)
    assert error == {
        "error": {
            "message": 'Slow\n"down"',
            "type": "requests",
            "param": None,
            "code": "rate_limit_exceeded",
        }
    }
    assert {c["choices"][0]["finish_reason"] for c in chunks} == {None}
    late = [encoder.encode(HELLO), encoder.error(RateLimited("again")), encoder.end()]
    assert late == [b"", b"", b""]


def test_a_failed_event_becomes_that_error() -> None:
    failed = Failed("engine died", code="worker_lost", status=503)
    sent = streamed(chat_request(stream=True), HELLO[:2], [failed, TextDelta("late")])
    assert read_stream(sent)[-1]["error"] == {
        "message": "engine died",
        "type": "server_error",
        "param": None,
        "code": "worker_lost",
    }


@pytest.mark.parametrize(
    "events", [[], [STARTED], HELLO[:-1], [*HELLO, TextDelta("x", 1)]], ids=len
)
def test_an_answer_without_its_end_is_not_passed_off_as_whole(events: list[Event]) -> None:
    encoder = ChatEndpoint().stream_encoder(chat_request(stream=True))
    encoder.encode(events)
    assert not encoder.finished
    with pytest.raises(UpstreamUnavailable):
        encoder.end()
    collector = ChatEndpoint().collector(chat_request())
    collector.add(events)
    with pytest.raises(UpstreamUnavailable):
        collector.body()


# -- Verbatim bytes --------------------------------------------------------------------------------------------------

FIRST = b'data: {"id":"u","choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
PIECE = b'data: {"id":"u","odd":[1.50],"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
LAST = b'data: {"id":"u","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'


def test_verbatim_bytes_pass_as_they_are() -> None:
    request = chat_request(stream=True)
    batches: list[list[Event]] = [
        [STARTED, Verbatim(FIRST, has_content=False)],
        [Verbatim(PIECE * 2, num_chunks=2), Verbatim(LAST, finished=(Finished("stop"),)), USAGE],
    ]
    assert streamed(request, *batches) == FIRST + PIECE * 2 + LAST + b"data: [DONE]\n\n"


def test_the_usage_chunk_after_verbatim_bytes_has_their_head() -> None:
    request = chat_request(stream=True, stream_options={"include_usage": True})
    events: list[Event] = [STARTED, Verbatim(PIECE + LAST, finished=(Finished("stop"),)), USAGE]
    last = read_stream(streamed(request, events))[-1]
    assert (last["id"], last["choices"], last["usage"]) == ("chatcmpl-7", [], USAGE_JSON)


@pytest.mark.parametrize("first", [Verbatim(FIRST, has_content=False), Verbatim(PIECE)])
def test_events_go_on_where_verbatim_bytes_left_off(first: Verbatim) -> None:
    chunks = chunks_of(STARTED, first, TextDelta("b"), Finished("stop"))
    assert [chunk["choices"][0]["delta"] for chunk in chunks[1:]] == [{"content": "b"}, {}]


def test_of_several_choices_only_those_in_the_bytes_have_begun() -> None:
    events = [STARTED, Verbatim(FIRST + PIECE), TextDelta("b"), TextDelta("x", 1)]
    chunks = chunks_of(*events, Finished("stop"), Finished("stop", 1), n=2)
    assert [(c["choices"][0]["index"], c["choices"][0]["delta"]) for c in chunks[2:5]] == [
        (0, {"content": "b"}),
        (1, {"role": "assistant", "content": "", "refusal": None}),
        (1, {"content": "x"}),
    ]


def test_a_call_that_began_in_the_bytes_goes_on_without_an_id() -> None:
    chunks = chunks_of(
        STARTED, Verbatim(PIECE), ToolCallDelta(0, arguments="{}"), Finished("tool_calls")
    )
    assert chunks[1]["choices"][0]["delta"] == {
        "tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]
    }


def test_verbatim_bytes_may_speak_of_no_choice() -> None:
    preface = b'data: {"choices":null}\n\ndata: {"choices":[]}\n\n'
    chunks = chunks_of(STARTED, Verbatim(preface, has_content=False), *HELLO[1:])
    assert chunks[2:] == chunks_of(*HELLO)


def test_a_verbatim_body_is_the_answer() -> None:
    body = b'{"id": "u",  "choices": [1.50]}'
    collector = ChatEndpoint().collector(chat_request())
    collector.add([STARTED, Verbatim(body, finished=(Finished("stop"),)), USAGE])
    assert collector.body() == body


# -- Whole answers ---------------------------------------------------------------------------------------------------


def test_a_whole_answer() -> None:
    assert collected(chat_request(), *HELLO, USAGE) == {
        "id": "chatcmpl-7",
        "object": "chat.completion",
        "created": 1_700_000_000,
        "model": "up-model",
        "system_fingerprint": "fp_1",
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": "Hello",
                    "refusal": None,
                    "annotations": [],
                },
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": USAGE_JSON,
    }


def test_choices_stand_in_order() -> None:
    events = [TextDelta("x", 1), Finished("stop", 1), TextDelta("a"), Finished("length")]
    choices = collected(chat_request(n=2), *events)["choices"]
    assert [(c["index"], c["message"]["content"], c["finish_reason"]) for c in choices] == [
        (0, "a", "length"),
        (1, "x", "stop"),
    ]


def test_content_is_null_beside_calls_and_text_otherwise() -> None:
    message = collected(chat_request(), *CALL)["choices"][0]["message"]
    assert message["content"] is None
    assert message["tool_calls"] == [
        {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    ]
    empty = collected(chat_request(), Finished("stop"))["choices"][0]["message"]
    assert empty["content"] == ""
    assert "tool_calls" not in empty


def test_a_refusal_stands_in_place_of_content() -> None:
    events = [RefusalDelta("I "), RefusalDelta("won't."), Finished("stop")]
    message = collected(chat_request(), *events)["choices"][0]["message"]
    assert (message["content"], message["refusal"]) == (None, "I won't.")
    assert join_chat(chunks_of(*events))[0]["message"]["refusal"] == "I won't."


def test_a_failed_answer_is_raised() -> None:
    collector = ChatEndpoint().collector(chat_request())
    collector.add([*HELLO, Failed("engine died", status=503)])
    with pytest.raises(UpstreamError) as caught:
        collector.body()
    assert (caught.value.status, caught.value.message) == (503, "engine died")


def test_an_answer_can_be_sent_back_as_a_turn() -> None:
    events = [ReasoningDelta("Hm", signature="c2ln"), *CALL]
    message = collected(chat_request(), *events)["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": "call_1", "content": "x"}
    user = {"role": "user", "content": "hi"}
    read = chat_request(messages=[user, message, result]).messages[1]
    assert [type(part).__name__ for part in read.parts] == ["Reasoning", "ToolCall"]


def test_the_official_clients_types_take_both_forms() -> None:
    from openai.types.chat import ChatCompletion, ChatCompletionChunk

    fields: dict[str, Any] = {"logprobs": True, "stream_options": {"include_usage": True}}
    logprob = TokenLogprob("Hel", -0.5, [72], [TokenLogprob("Hel", -0.5, [72])])
    events = [STARTED, TextDelta("Hel", logprobs=(logprob,)), *CALL, USAGE]
    for chunk in chunks_of(*events, **fields):
        ChatCompletionChunk.model_validate(chunk, strict=True)
    ChatCompletion.model_validate(collected(chat_request(logprobs=True), *events), strict=True)


# -- Both ------------------------------------------------------------------------------------------------------------

TEXTS = st.text(max_size=6)
CHOICES = st.integers(0, 2)
LOGPROBS = st.lists(
    st.builds(TokenLogprob, TEXTS, st.floats(max_value=0), st.just([1])), max_size=2
).map(tuple)
CONTENT = st.one_of(
    st.builds(TextDelta, TEXTS, CHOICES, LOGPROBS),
    st.builds(ReasoningDelta, TEXTS, CHOICES, st.none() | TEXTS),
    st.builds(RefusalDelta, TEXTS, CHOICES),
    st.builds(
        ToolCallDelta,
        st.integers(0, 2),
        CHOICES,
        st.sampled_from(["call_1", "call_2"]),
        st.just("f"),
        TEXTS,
    ),
    st.builds(Finished, st.sampled_from(["stop", "length", "tool_calls"]), CHOICES),
)


def comparable(message: dict[str, Any]) -> dict[str, Any]:
    """Without what a stream cannot say: null against an empty text."""
    shown = {k: v for k, v in message.items() if k != "annotations" and v}
    calls = shown.get("tool_calls")
    if isinstance(calls, dict):
        shown["tool_calls"] = [call for _, call in sorted(calls.items())]
    return shown


@given(st.lists(CONTENT, max_size=12), st.integers(1, 12))
def test_a_stream_joined_is_the_whole_answer(content: list[Event], cut: int) -> None:
    ends: list[Event] = [Finished("stop", choice) for choice in range(3)]
    events = [STARTED, *content, *ends, USAGE]
    request = chat_request(stream=True, n=3, logprobs=True)
    joined = join_chat(read_stream(streamed(request, events[:cut], events[cut:])))
    whole = collected(request, *events)
    assert sorted(joined) == [choice["index"] for choice in whole["choices"]]
    for choice in whole["choices"]:
        streamed_choice = joined[choice["index"]]
        assert comparable(streamed_choice["message"]) == comparable(choice["message"])
        assert streamed_choice["logprobs"] == choice["logprobs"]["content"]
        assert streamed_choice["finish_reason"] == choice["finish_reason"]
