"""The frame of a stream: bytes of an event, and the bookkeeping of choices."""

from __future__ import annotations

import json

from gateway.streaming import DONE, STREAM_HEADERS, Choices, write_event
from plugins.sse import SSEParser


def written(payload: object, event: str | None = None) -> bytes:
    buffer = bytearray()
    write_event(buffer, payload, event)
    return bytes(buffer)


def test_an_event_is_one_data_line_and_a_blank_one() -> None:
    assert written({"text": "a\n\ndata: b\r\n"}) == b'data: {"text":"a\\n\\ndata: b\\r\\n"}\n\n'


def test_a_named_event_has_its_name_in_front() -> None:
    assert written({}, "response.created") == b"event: response.created\ndata: {}\n\n"


def test_what_is_written_reads_back() -> None:
    payload = {"text": "naïve\u2028日本\x00\x85"}
    parser = SSEParser()
    events = parser.feed(b": keep-alive\n\n" + written(payload) + DONE)
    assert [event.data for event in events[1:]] == [b"[DONE]"]
    assert json.loads(events[0].data) == payload


def test_streams_are_neither_cached_nor_held_back() -> None:
    assert dict(STREAM_HEADERS) == {
        b"content-type": b"text/event-stream; charset=utf-8",
        b"cache-control": b"no-cache",
        b"x-accel-buffering": b"no",
    }


def test_a_choice_begins_once() -> None:
    choices = Choices()
    assert [choices.begin(0), choices.begin(0), choices.begin(1)] == [True, False, True]


def test_an_ended_choice_does_not_begin_again() -> None:
    choices = Choices()
    choices.end(0)
    assert not choices.begin(0)


def test_all_have_ended_when_none_is_open_and_one_has_ended() -> None:
    choices = Choices()
    seen = [choices.all_ended]
    for step in (lambda: choices.begin(0), lambda: choices.begin(1)):
        step()
        seen.append(choices.all_ended)
    for choice in (1, 0):
        choices.end(choice)
        seen.append(choices.all_ended)
    assert seen == [False, False, False, False, True]
