"""Streams of OpenAI-shaped servers in every dialect seen in the wild, in both lanes and at every byte split."""

from __future__ import annotations

from typing import Any

import pytest

from plugins.events import (
    Started,
    TextDelta,
    Verbatim,
)
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
    body,
    chunk,
    head,
    see,
    sse,
    usage_chunk,
)
from tests.plugins.openai_reading import (
    CALL,
    NOW,
    answer_format,
    both_lanes,
    read_stream,
    tool_chunk,
)

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


@pytest.mark.parametrize("blank", [b"", b" "])
def test_a_clock_that_goes_on_does_not_leave_the_lane_of_bytes(blank: bytes) -> None:
    later = [{**c, "created": CREATED + i} for i, c in enumerate(HELLO)]
    events, _ = read_stream(sse(*later, DONE).replace(b'"created":', b'"created":' + blank))
    assert [type(event) for event in events] == [Started, Verbatim]
    assert see(events).text == "Hello"


def test_a_second_field_of_that_name_is_not_mistaken_for_the_time() -> None:
    odd = {**HEL, "created": CREATED + 1, "x": {"created": CREATED + 1}}
    events, failure = read_stream(sse(ROLE, odd, LO, STOP, DONE))
    assert failure is None
    assert see(events).text == "Hello"


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
