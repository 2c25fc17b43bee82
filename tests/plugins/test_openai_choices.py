"""Finish reasons, choices and what else stands in a choice, and streams that fail."""

from __future__ import annotations

from typing import Any

import pytest

from plugins.events import (
    ReasoningDelta,
    TextDelta,
)
from tests.plugins.openai_answers import (
    DONE,
    HEL,
    HELLO,
    LO,
    ROLE,
    STOP,
    chunk,
    head,
    see,
    sse,
)
from tests.plugins.openai_reading import (
    answer_format,
    both_lanes,
    read_stream,
)

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
