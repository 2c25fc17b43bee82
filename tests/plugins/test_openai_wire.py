"""Answers of OpenAI-shaped servers, in every dialect seen in the wild, read in both lanes and at every byte split."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from plugins.errors import UpstreamError
from plugins.events import Event, ReasoningDelta, Request, Sampling, Started, TextDelta, Verbatim
from plugins.interfaces import Call
from plugins.providers.openai_errors import ErrorReader
from plugins.providers.openai_reader import AnswerFormat
from plugins.secrets import Secret
from tests.plugins.openai_answers import (
    CREATED,
    DONE,
    HEL,
    HELLO,
    ID,
    LO,
    MODEL,
    ROLE,
    STOP,
    USAGE,
    Seen,
    body,
    chunk,
    head,
    see,
    sse,
    usage_chunk,
)

NOW = 1_800_000_000.0
KEY = "sk-upstream-secret"


def answer_format(
    verbatim: bool = True, stream: bool = True, dialect: Any = "chat", **sampling: Any
) -> AnswerFormat:
    request = Request("req_1", dialect, "m", stream=stream, sampling=Sampling(**sampling))
    errors = ErrorReader("up", [Secret(KEY)], lambda: NOW)
    return AnswerFormat("up", request, Call("up-model", verbatim=verbatim), errors, lambda: NOW)


def read_stream(
    data: bytes, split: int = 0, **kwargs: Any
) -> tuple[list[Event], UpstreamError | None]:
    reader = answer_format(**kwargs).stream_reader()
    events: list[Event] = []
    step = split or len(data) or 1
    for start in range(0, len(data), step):
        events += reader.feed(data[start : start + step])
        if reader.done or reader.failure is not None:
            return events, reader.failure
    events += reader.end()
    return events, reader.failure


def both_lanes(stream: bytes, **kwargs: Any) -> list[tuple[Seen, UpstreamError | None]]:
    results: list[tuple[Seen, UpstreamError | None]] = []
    for verbatim in (True, False):
        for split in (0, 1, 7):
            events, failure = read_stream(stream, split, verbatim=verbatim, **kwargs)
            results.append((see(events), failure))
    return results


CALL = {
    "index": 0,
    "id": "call_1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city":"Oslo"}'},
}


def tool_chunk(*calls: Any, finish: Any = None) -> dict[str, Any]:
    return chunk({"role": "assistant", "content": None, "tool_calls": [*calls]}, finish)


# -- Streams that must read "Hello", stop ----------------------------------------------------------

NULL_CHUNK = {**head("chat.completion.chunk"), "choices": [{"index": 0, "finish_reason": None}]}
PREFACE = {
    "id": "",
    "object": "",
    "created": 0,
    "model": "",
    "choices": [],
    "prompt_filter_results": [],
}
NO_HEAD = [{k: v for k, v in c.items() if k in ("object", "choices")} for c in HELLO]
TWO_LINES = (
    '{"id":"x","object":"chat.completion.chunk",\ndata:\ndata: "created":1,"model":"m",'
    '"choices":[{"index":0,"delta":{"content":"Hello"},"finish_reason":"stop"}]}'
)
HELLO_STREAMS: dict[str, bytes] = {
    "canonical": sse(*HELLO, DONE),
    "crlf": sse(*HELLO, DONE, end="\r\n"),
    "cr": sse(*HELLO, DONE, end="\r"),
    "bom": b"\xef\xbb\xbf" + sse(*HELLO, DONE),
    "no space": sse(*HELLO, DONE).replace(b"data: ", b"data:"),
    "comments": sse(*HELLO, DONE).replace(b"data: ", b": OPENROUTER PROCESSING\n\ndata: "),
    "glued comment": b": hb\n" + sse(*HELLO, DONE),
    "comment as data": sse(": keepalive", ROLE, HEL, ": keepalive", LO, STOP, DONE),
    "other fields": b"retry: 3000\n\nid: 1\n\nevent: hello\n\nfoo: bar\nnocolon\n"
    + sse(*HELLO, DONE),
    "ids": sse(*HELLO, DONE).replace(b"data: ", b"id: 1\ndata: "),
    "three data lines": f"data: {TWO_LINES}\n\ndata: [DONE]\n\n".encode(),
    "no done": sse(*HELLO),
    "done without blank line": sse(*HELLO, DONE)[:-1],
    "after done": sse(*HELLO, DONE, {"oops": 1}, DONE),
    "empty data": b"data:\n\ndata: \n\ndata: null\n\n" + sse(*HELLO, DONE),
    "filter preface": sse(PREFACE, *HELLO, DONE),
    "delta null": sse(ROLE, HEL, chunk(None), NULL_CHUNK, LO, STOP, DONE),
    "nulls": sse(
        chunk({"role": "assistant", "content": None, "tool_calls": None, "function_call": None}),
        chunk({"content": "Hel", "tool_calls": None, "role": None}),
        chunk({"content": "lo", "tool_calls": []}),
        chunk({"content": None}, "stop"),
        DONE,
    ),
    "finish with text": sse(ROLE, HEL, chunk({"content": "lo"}, "stop"), DONE),
    "finish empty": sse(
        chunk({"role": "assistant", "content": "Hel"}, ""), chunk({"content": "lo"}, ""), STOP, DONE
    ),
    "eos_token": sse(ROLE, HEL, LO, chunk({}, "eos_token"), DONE),
    "two finishes": sse(ROLE, HEL, chunk({"content": "lo"}, "stop"), STOP, DONE),
    "no id": sse(*NO_HEAD, DONE),
    "other ids": sse(ROLE, HEL, {**LO, "id": "other", "created": 1}, STOP, DONE),
    "role each time": sse(
        *[chunk({"role": "assistant", "content": c}) for c in "Hello"], STOP, DONE
    ),
    "no role": sse(HEL, LO, STOP, DONE),
    "error null": sse(*[{**c, "error": None} for c in HELLO], DONE),
    "no index": sse(
        *[
            {**head("chat.completion.chunk"), "choices": [{"delta": {"content": c}}]}
            for c in ("Hel", "lo")
        ],
        STOP,
        DONE,
    ),
    "message for delta": sse({**body({"content": "Hello"}), "usage": None}, DONE),
    "parts": sse(chunk({"content": [{"type": "text", "text": "Hello"}]}), STOP, DONE),
    "done without finish": sse(ROLE, HEL, LO, DONE),
    "spaces": sse(*HELLO, DONE).replace(b"data: {", b"data:   {"),
}


@pytest.mark.parametrize("stream", HELLO_STREAMS.values(), ids=HELLO_STREAMS)
def test_a_stream_reads_hello_whatever_its_dialect(stream: bytes) -> None:
    for seen, failure in both_lanes(stream):
        assert failure is None
        assert seen.text == "Hello"
        assert seen.finish == {0: "stop"}
        assert seen.usage is None


def test_canonical_chunks_of_one_read_are_one_write() -> None:
    events, _ = read_stream(sse(*HELLO, DONE))
    started, verbatim = events
    assert started == Started(ID, MODEL, CREATED)
    assert isinstance(verbatim, Verbatim)
    assert verbatim.data == sse(*HELLO)
    assert (verbatim.num_chunks, verbatim.has_content) == (2, True)


def test_vendor_fields_of_canonical_chunks_pass() -> None:
    odd = chunk({"role": "assistant", "content": "x", "vendor": [1]}, "stop", stats={"a": 1})
    events, _ = read_stream(sse(odd, DONE))
    assert isinstance(events[1], Verbatim)
    assert b'"vendor":[1]' in events[1].data
    assert b'"stats":{"a":1}' in events[1].data


@pytest.mark.parametrize(
    ("first", "has_content"),
    [
        (ROLE, False),
        (chunk({"role": "assistant", "content": "x"}), True),
        (chunk({"role": "assistant", "reasoning_content": "x"}), True),
        (chunk({"role": "assistant", "refusal": "x"}), True),
        (tool_chunk(CALL), True),
        (chunk({"role": "assistant"}, "stop"), True),
    ],
)
def test_a_verbatim_batch_says_whether_content_began(first: Any, has_content: bool) -> None:
    reader = answer_format().stream_reader()
    events = reader.feed(sse(first))
    assert isinstance(events[1], Verbatim)
    assert events[1].has_content is has_content


def test_odd_chunks_between_canonical_ones_keep_their_place() -> None:
    odd = chunk({"content": "b"}, "")
    events, _ = read_stream(sse(ROLE, chunk({"content": "a"}), odd, chunk({"content": "c"}), STOP))
    assert [type(event) for event in events] == [Started, Verbatim, TextDelta, Verbatim]
    assert see(events).text == "abc"


def test_missing_head_fields_are_made_once() -> None:
    events, _ = read_stream(sse(*NO_HEAD, DONE))
    started = see(events).started[0]
    assert started.id.startswith("chatcmpl-")
    assert (started.model, started.created_s) == ("up-model", int(NOW))


def test_a_client_that_collects_never_gets_stream_bytes() -> None:
    events, failure = read_stream(sse(*HELLO, usage_chunk(), DONE), stream=False)
    seen = see(events)
    assert failure is None
    assert (seen.text, seen.num_verbatim) == ("Hello", 0)
    assert seen.usage is not None


# -- Characters ------------------------------------------------------------------------------------

TEXT = "naïve 日本語 🎉 👨‍👩‍👧"


@pytest.mark.parametrize("ascii_only", [False, True])
def test_characters_survive_every_split(ascii_only: bool) -> None:
    stream = sse(chunk({"role": "assistant", "content": TEXT}), STOP, DONE)
    if ascii_only:
        escaped = "".join(f"\\u{unit:04x}" for unit in _utf16_units(TEXT))
        stream = sse(chunk({"role": "assistant", "content": "@"}), STOP, DONE).replace(
            b"@", escaped.encode()
        )
    for seen, failure in both_lanes(stream):
        assert failure is None
        assert seen.text == TEXT


def _utf16_units(text: str) -> list[int]:
    raw = text.encode("utf-16-le")
    return [int.from_bytes(raw[i : i + 2], "little") for i in range(0, len(raw), 2)]


def test_a_character_cut_into_two_chunks_is_joined() -> None:
    high, low = b"\\ud83c", b"\\udf89"
    stream = sse(ROLE, chunk({"content": "a@"}), chunk({"content": "@b"}), STOP, DONE)
    stream = stream.replace(b"a@", b"a" + high).replace(b"@b", low + b"b")
    for seen, failure in both_lanes(stream):
        assert failure is None
        assert seen.text == "a🎉b"


def test_half_a_character_at_the_end_is_shown_as_unreadable() -> None:
    stream = sse(ROLE, chunk({"content": "a@"}), STOP, DONE).replace(b"a@", b"a\\ud83c")
    for seen, failure in both_lanes(stream):
        assert failure is None
        assert seen.text == "a\ufffd"
        assert seen.finish == {0: "stop"}


def test_a_byte_that_is_no_utf8_does_not_end_the_stream() -> None:
    stream = sse(*HELLO, DONE).replace(b"Hel", b"\xffHel")
    for seen, failure in both_lanes(stream):
        assert failure is None
        assert seen.text == "\ufffdHello"


# -- Reasons, choices, other content ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("stop", "stop"),
        ("end_turn", "stop"),
        ("stop_sequence", "stop"),
        ("STOP", "stop"),
        ("something new", "stop"),
        ("length", "length"),
        ("max_tokens", "length"),
        ("MAX_TOKENS", "length"),
        ("tool_use", "tool_calls"),
        ("function_call", "tool_calls"),
        ("content_filter", "content_filter"),
        ("SAFETY", "content_filter"),
    ],
)
def test_finish_reasons_of_all_vocabularies_become_ours(reason: str, expected: str) -> None:
    for seen, _ in both_lanes(sse(ROLE, HEL, chunk({}, reason), DONE)):
        assert seen.finish == {0: expected}


@pytest.mark.parametrize("reason", ["error", "abort", "insufficient_system_resource"])
def test_a_reason_that_means_failure_is_a_failure(reason: str) -> None:
    for seen, failure in both_lanes(sse(ROLE, HEL, chunk({}, reason), DONE)):
        assert failure is not None
        assert failure.retryable
        assert (seen.text, seen.finish) == ("Hel", {})


def test_choices_interleave_each_with_its_own_end() -> None:
    stream = sse(
        chunk({"role": "assistant", "content": "a"}, index=0),
        chunk({"role": "assistant", "content": "x"}, index=1),
        chunk({"content": "b"}, index=0),
        chunk({"content": "y"}, index=1),
        chunk({}, "stop", index=1),
        chunk({}, "length", index=0),
        DONE,
    )
    for seen, failure in both_lanes(stream, n=2):
        assert failure is None
        assert seen.content == {0: "ab", 1: "xy"}
        assert seen.finish == {0: "length", 1: "stop"}


def test_two_choices_in_one_chunk_are_both_read() -> None:
    choices = [
        {"index": i, "delta": {"role": "assistant", "content": c}, "finish_reason": "stop"}
        for i, c in enumerate("ab")
    ]
    for seen, _ in both_lanes(sse({**head("chat.completion.chunk"), "choices": choices}, DONE)):
        assert seen.content == {0: "a", 1: "b"}
        assert seen.finish == {0: "stop", 1: "stop"}


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_comes_under_either_name(name: str) -> None:
    stream = sse(ROLE, chunk({name: "hm"}), *HELLO[1:], DONE)
    for seen, _ in both_lanes(stream):
        assert (seen.reasoning, seen.text) == ("hm", "Hello")


def test_reasoning_under_both_names_at_once_is_told_once() -> None:
    both = chunk({"reasoning_content": "hm", "reasoning": "hm"})
    events, _ = read_stream(sse(ROLE, both, STOP, DONE), verbatim=False)
    assert [e.text for e in events if isinstance(e, ReasoningDelta)] == ["hm"]


def test_refusals_are_kept() -> None:
    events, _ = read_stream(sse(ROLE, chunk({"refusal": "no"}), STOP, DONE), verbatim=False)
    assert see(events).refusal == "no"


def test_logprobs_come_with_their_text() -> None:
    token = {
        "token": "Hi",
        "logprob": -0.5,
        "bytes": [72, 105],
        "top_logprobs": [{"token": "Ho", "logprob": -1}],
    }
    piece = chunk({"role": "assistant", "content": "Hi"})
    piece["choices"][0]["logprobs"] = {"content": [token]}
    events, _ = read_stream(sse(piece, STOP, DONE), verbatim=False)
    delta = next(event for event in events if isinstance(event, TextDelta))
    (entry,) = delta.logprobs
    assert (entry.token, entry.logprob, entry.bytes) == ("Hi", -0.5, [72, 105])
    assert (entry.top[0].token, entry.top[0].logprob) == ("Ho", -1.0)


# -- Usage -----------------------------------------------------------------------------------------

RUNNING = [{**c, "usage": {**USAGE, "completion_tokens": i}} for i, c in enumerate(HELLO)]


@pytest.mark.parametrize(
    ("stream", "counts"),
    [
        (sse(*HELLO, usage_chunk(), DONE), (5, 2)),
        (sse(*HELLO, usage_chunk(), usage_chunk(), DONE), (5, 2)),
        (sse(*HELLO, {**usage_chunk(), "choices": None}, DONE), (5, 2)),
        (sse(*HELLO, {"usage": USAGE}, DONE), (5, 2)),
        (sse(ROLE, HEL, LO, usage_chunk(), STOP, DONE), (5, 2)),
        (sse(ROLE, HEL, LO, {**STOP, "usage": USAGE}, DONE), (5, 2)),
        (sse(*RUNNING, DONE), (5, 3)),
        (sse(*HELLO, usage_chunk()), (5, 2)),
        (
            sse(*HELLO, usage_chunk(prompt_tokens=0, completion_tokens=0, total_tokens=0), DONE),
            (0, 0),
        ),
        (sse(*HELLO, usage_chunk(prompt_tokens=5, total_tokens=7), DONE), (5, 2)),
        (
            sse(
                *HELLO, usage_chunk(prompt_tokens=None, completion_tokens="x", total_tokens=7), DONE
            ),
            (0, 7),
        ),
    ],
)
def test_usage_is_found_wherever_it_stands_and_told_once_at_the_end(
    stream: bytes, counts: tuple[int, int]
) -> None:
    for seen, failure in both_lanes(stream):
        assert failure is None
        assert (seen.text, seen.finish) == ("Hello", {0: "stop"})
        assert seen.usage is not None
        assert (seen.usage.prompt_tokens, seen.usage.completion_tokens) == counts


@pytest.mark.parametrize(
    "details",
    [
        {"prompt_tokens_details": {"cached_tokens": 4}},
        {"prompt_cache_hit_tokens": 4},
        {"cached_tokens": 4},
    ],
)
def test_cached_and_reasoning_tokens_are_kept(details: dict[str, Any]) -> None:
    usage = {**USAGE, **details, "completion_tokens_details": {"reasoning_tokens": 1}}
    for seen, _ in both_lanes(sse(*HELLO, usage_chunk(**usage), DONE)):
        assert seen.usage is not None
        assert (seen.usage.cached_tokens, seen.usage.reasoning_tokens) == (4, 1)


# -- Tool calls ------------------------------------------------------------------------------------


def pieces_of_a_call() -> list[dict[str, Any]]:
    first = {**CALL, "function": {"name": "get_weather", "arguments": ""}}
    rest = [{"index": 0, "function": {"arguments": text}} for text in ('{"city"', ':"Oslo"}')]
    return [tool_chunk(first), *[chunk({"tool_calls": [piece]}) for piece in rest]]


def without(call: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in call.items() if name not in names}


OBJECT_CALL = {**CALL, "function": {"name": "get_weather", "arguments": {"city": "Oslo"}}}
REPEATED = [
    {**CALL, "function": {**CALL["function"], "arguments": a}} for a in ('{"city"', ':"Oslo"}')
]
TOOL_STREAMS: dict[str, list[Any]] = {
    "canonical": pieces_of_a_call(),
    "whole": [tool_chunk(CALL)],
    "no id, type, index": [tool_chunk(without(CALL, "id", "type", "index"))],
    "empty id": [tool_chunk({**CALL, "id": ""})],
    "arguments object": [tool_chunk(OBJECT_CALL)],
    "one object": [chunk({"role": "assistant", "tool_calls": CALL})],
    "id and name repeated": [tool_chunk(call) for call in REPEATED],
    "name late": [
        tool_chunk({"index": 0, "id": "call_1", "function": {"arguments": '{"city"'}}),
        tool_chunk({"index": 0, "function": {"name": "get_weather", "arguments": ':"Oslo"}'}}),
    ],
    "arguments null first": [
        tool_chunk({**CALL, "function": {"name": "get_weather", "arguments": None}}),
        tool_chunk({"index": 0, "function": {"arguments": '{"city":"Oslo"}'}}),
    ],
    "flat": [tool_chunk({"id": "call_1", "name": "get_weather", "arguments": {"city": "Oslo"}})],
}


@pytest.mark.parametrize("chunks", TOOL_STREAMS.values(), ids=TOOL_STREAMS)
def test_a_tool_call_is_read_whatever_its_form(chunks: list[Any]) -> None:
    for seen, failure in both_lanes(sse(*chunks, chunk({}, "tool_calls"), DONE)):
        assert failure is None
        (call,) = seen.calls.values()
        assert call["name"] == "get_weather"
        assert msgspec.json.decode(call["arguments"]) == {"city": "Oslo"}
        assert call["id"].startswith("call_")
        assert seen.finish == {0: "tool_calls"}


def test_canonical_tool_calls_pass_verbatim() -> None:
    events, _ = read_stream(sse(*pieces_of_a_call(), chunk({}, "tool_calls"), DONE))
    assert [type(event) for event in events] == [Started, Verbatim]


def two_calls(**second: Any) -> list[Any]:
    other = {**CALL, "id": "call_2", "index": 1, **second}
    return [tool_chunk(CALL), tool_chunk(other), chunk({}, "tool_calls"), DONE]


@pytest.mark.parametrize(
    "stream",
    [
        two_calls(),
        two_calls(index=0),  # Gemini's endpoint numbers every call 0
        two_calls(index=7),
        [tool_chunk(CALL, {**CALL, "id": "call_2", "index": 1}), chunk({}, "tool_calls"), DONE],
        [
            tool_chunk(without(CALL, "index"), {**without(CALL, "index"), "id": "call_2"}),
            STOP,
            DONE,
        ],
    ],
    ids=["plain", "same-index", "gap", "one-chunk", "no-index"],
)
def test_parallel_calls_are_counted_from_0_and_kept_apart(stream: list[Any]) -> None:
    for seen, _ in both_lanes(sse(*stream)):
        assert sorted(seen.calls) == [0, 1]
        assert [seen.calls[i]["id"] for i in (0, 1)] == ["call_1", "call_2"]
        assert {call["arguments"] for call in seen.calls.values()} == {'{"city":"Oslo"}'}


def test_interleaved_pieces_of_two_calls_go_where_they_belong() -> None:
    def piece(index: int, text: str) -> dict[str, Any]:
        return chunk({"tool_calls": [{"index": index, "function": {"arguments": text}}]})

    first = [
        {**CALL, "index": i, "id": f"call_{i}", "function": {"name": "f", "arguments": ""}}
        for i in (0, 1)
    ]
    stream = sse(
        *[tool_chunk(call) for call in first],
        *[piece(i % 2, text) for i, text in enumerate(["{", "[", "}", "]"])],
        chunk({}, "tool_calls"),
        DONE,
    )
    for seen, _ in both_lanes(stream):
        assert [seen.calls[i]["arguments"] for i in (0, 1)] == ["{}", "[]"]


def test_a_call_without_arguments_gets_an_empty_object() -> None:
    call = {**CALL, "function": {"name": "now", "arguments": ""}}
    for seen, _ in both_lanes(sse(tool_chunk(call), chunk({}, "tool_calls"), DONE)):
        assert seen.calls[0]["arguments"] == "{}"


def test_end_turn_with_a_call_means_tool_calls() -> None:
    for seen, _ in both_lanes(sse(tool_chunk(CALL), chunk({}, "end_turn"), DONE)):
        assert seen.finish == {0: "tool_calls"}


def test_done_without_a_finish_after_a_call_means_tool_calls() -> None:
    for seen, _ in both_lanes(sse(tool_chunk(CALL), DONE)):
        assert seen.finish == {0: "tool_calls"}


def test_the_form_before_tools_is_read_as_a_call() -> None:
    stream = sse(
        chunk({"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}), DONE
    )
    events, _ = read_stream(stream, verbatim=False)
    assert see(events).calls[0]["name"] == "f"


# -- Streams that fail -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tail", "status", "message"),
    [
        (
            sse({"error": {"message": "engine died", "type": "server_error", "code": 500}}),
            500,
            "engine died",
        ),
        (sse({"error": {"message": "Rate limit exceeded", "code": 429}}), 429, "Rate limit"),
        (sse({"error": "out of memory"}), 502, "out of memory"),
        (b'event: error\ndata: {"message":"overloaded","code":"503"}\n\n', 503, "overloaded"),
        (sse({"object": "error", "message": "boom", "code": 400}), 400, "boom"),
        (
            sse({"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}),
            502,
            "Overloaded",
        ),
        (b"data: {broken\n\n", 502, "not JSON"),
        (b"", 502, "ended before"),
    ],
    ids=["500", "429", "text", "event", "vllm", "anthropic", "broken", "cut"],
)
@pytest.mark.parametrize("before", [[], [ROLE, HEL]], ids=["first", "middle"])
def test_an_error_ends_the_stream_after_what_came_before(
    before: list[Any], tail: bytes, status: int, message: str
) -> None:
    for seen, failure in both_lanes(sse(*before) + tail):
        assert failure is not None
        assert failure.status == status
        assert message in failure.message
        assert seen.text == ("Hel" if before else "")
        assert seen.finish == {}
        assert bool(seen.started) is bool(before)


def test_what_follows_an_error_is_not_read() -> None:
    for seen, failure in both_lanes(sse(ROLE, HEL, {"error": {"message": "x"}}, LO, STOP, DONE)):
        assert failure is not None
        assert seen.text == "Hel"


def test_a_stream_of_nothing_but_its_end_is_a_failure() -> None:
    for _, failure in both_lanes(sse(DONE)):
        assert failure is not None
        assert "without an answer" in failure.message


def test_an_event_beyond_the_limit_is_a_failure_that_names_it() -> None:
    reader = answer_format().stream_reader()
    piece = b"x" * 1_000_000
    reader.feed(b"data: ")
    for _ in range(40):
        if reader.failure is None:
            reader.feed(piece)
    assert reader.failure is not None
    assert "33554432 bytes" in reader.failure.message


# -- Whole answers ---------------------------------------------------------------------------------


def read_body(document: Any, **kwargs: Any) -> list[Event]:
    raw = document if isinstance(document, bytes) else msgspec.json.encode(document)
    return answer_format(**{"stream": False, **kwargs}).read_body(raw)


def test_a_canonical_body_passes_as_it_is() -> None:
    raw = msgspec.json.encode(body({"content": "hi", "annotations": []}, vendor=1))
    seen = see(read_body(raw))
    assert seen.bodies == [raw]
    assert seen.finish == {0: "stop"}
    assert seen.usage is not None
    assert seen.started == [Started(ID, MODEL, CREATED)]


BODIES: dict[str, Any] = {
    "plain": body({"content": "Hello"}),
    "no role": {
        **body({}),
        "choices": [{"index": 0, "message": {"content": "Hello"}, "finish_reason": "stop"}],
    },
    "no finish": body({"content": "Hello"}, None),
    "error null": {**body({"content": "Hello"}), "error": None},
    "no id": without(body({"content": "Hello"}), "id", "created", "model"),
    "bom": b"\xef\xbb\xbf" + msgspec.json.encode(body({"content": "Hello"})),
}


@pytest.mark.parametrize("document", BODIES.values(), ids=BODIES)
def test_a_body_reads_hello_whatever_its_dialect(document: Any) -> None:
    seen = see(read_body(document, verbatim=False))
    assert (seen.text, seen.finish) == ("Hello", {0: "stop"})
    assert seen.usage is not None


def test_a_body_in_answer_to_a_stream_becomes_events() -> None:
    seen = see(read_body(body({"content": "Hello"}), stream=True))
    assert (seen.text, seen.num_verbatim) == ("Hello", 0)


@pytest.mark.parametrize(
    "tool_calls",
    [[OBJECT_CALL], CALL, [without(CALL, "id", "type")]],
    ids=["object-arguments", "one-object", "no-id"],
)
def test_odd_tool_calls_of_a_body_are_made_canonical(tool_calls: Any) -> None:
    document = body({"content": None, "tool_calls": tool_calls}, "end_turn")
    for verbatim in (True, False):
        seen = see(read_body(document, verbatim=verbatim))
        assert seen.num_verbatim == 0
        assert seen.calls[0]["name"] == "get_weather"
        assert msgspec.json.decode(seen.calls[0]["arguments"]) == {"city": "Oslo"}
        assert seen.finish == {0: "tool_calls"}


@pytest.mark.parametrize(
    ("document", "status"),
    [
        ({"error": {"message": "Rate limit exceeded", "code": 429}, "user_id": "x"}, 429),
        ({"error": {"message": "no capacity", "code": "503"}}, 503),
        ({"error": {"message": "odd", "code": 200}}, 502),
        ({"error": {"message": "odd", "code": 0}}, 502),
        ({"error": {"message": "odd", "code": "rate_limit"}}, 502),
        ({"error": {"message": "odd", "code": True}}, 502),
        ({"status": 200, "body": {"html-message": "Network connection lost."}}, 502),
        (body({"content": "x"}, choices=[]), 502),
        (body({"content": "x"}, choices=None), 502),
        (body(None), 200),
        ([], 502),
        (b"", 502),
        (b"{", 502),
        (b"[" * 100_000, 502),
        (b"null", 502),
    ],
)
def test_a_200_without_an_answer_is_an_upstream_failure(document: Any, status: int) -> None:
    if status == 200:  # an empty message is an answer all the same
        assert see(read_body(document)).finish == {0: "stop"}
        return
    for verbatim in (True, False):
        with pytest.raises(UpstreamError) as caught:
            read_body(document, verbatim=verbatim)
        assert caught.value.status == status
        assert caught.value.retryable


# -- Completions and embeddings --------------------------------------------------------------------


def text_chunk(text: str, finish: str | None = None, index: int = 0) -> dict[str, Any]:
    choice = {"index": index, "text": text, "logprobs": None, "finish_reason": finish}
    return {**head("text_completion"), "choices": [choice]}


def test_completions_stream_in_both_lanes() -> None:
    stream = sse(text_chunk("Hel"), text_chunk("lo"), text_chunk("", "length"), usage_chunk(), DONE)
    for seen, failure in both_lanes(stream, dialect="completions"):
        assert failure is None
        assert (seen.text, seen.finish) == ("Hello", {0: "length"})
        assert seen.usage is not None
    events, _ = read_stream(stream, dialect="completions")
    assert isinstance(events[1], Verbatim)


def test_a_completions_body_passes_or_is_read() -> None:
    choice = {
        "index": 0,
        "text": "ab",
        "finish_reason": "stop",
        "logprobs": {
            "tokens": ["a", "b"],
            "token_logprobs": [None, -1],
            "top_logprobs": [None, {"c": -2}],
            "text_offset": [0, 1],
        },
    }
    document = {**head("text_completion"), "choices": [choice]}
    assert see(read_body(document, dialect="completions")).bodies
    events = read_body(document, dialect="completions", verbatim=False)
    delta = next(event for event in events if isinstance(event, TextDelta))
    assert delta.text == "ab"
    assert delta.text_offsets == (0, 1)
    assert delta.logprobs[0].logprob != delta.logprobs[0].logprob  # NaN: has none
    assert delta.logprobs[1].top[0].token == "c"


def test_embeddings_pass_as_they_are_and_are_counted() -> None:
    document = {
        "object": "list",
        "data": [{"object": "embedding", "index": 0, "embedding": [0.1]}],
        "model": "e",
        "usage": {"prompt_tokens": 3, "total_tokens": 3},
    }
    seen = see(read_body(document, dialect="embeddings", verbatim=False))
    assert seen.bodies == [msgspec.json.encode(document)]
    assert seen.usage is not None
    assert (seen.usage.prompt_tokens, seen.usage.completion_tokens) == (3, 0)


@pytest.mark.parametrize(
    "document", [{"data": []}, {"error": {"message": "x", "code": 503}}, b"<html>"]
)
def test_embeddings_without_vectors_are_a_failure(document: Any) -> None:
    with pytest.raises(UpstreamError):
        read_body(document, dialect="embeddings")
