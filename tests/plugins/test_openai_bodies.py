"""Whole answers: passed as they are, read where they are odd, refused where there is no answer in them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from plugins.errors import UpstreamError
from plugins.events import (
    Started,
    TextDelta,
    Verbatim,
)
from tests.plugins.openai_answers import (
    CREATED,
    DONE,
    ID,
    MODEL,
    body,
    head,
    see,
    sse,
    usage_chunk,
)
from tests.plugins.openai_reading import (
    CALL,
    OBJECT_CALL,
    both_lanes,
    read_body,
    read_stream,
    without,
)

# -- Whole answers ---------------------------------------------------------------------------------


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
        ([], 502),
        (b"", 502),
        (b"{", 502),
        (b"[" * 100_000, 502),
        (b"null", 502),
    ],
)
def test_a_200_without_an_answer_is_an_upstream_failure(document: Any, status: int) -> None:
    for verbatim in (True, False):
        with pytest.raises(UpstreamError) as caught:
            read_body(document, verbatim=verbatim)
        assert caught.value.status == status
        assert caught.value.retryable


@pytest.mark.parametrize("message", [None, {"content": None}, {"content": ""}])
def test_an_empty_message_is_an_answer_all_the_same(message: Any) -> None:
    for verbatim in (True, False):
        assert see(read_body(body(message), verbatim=verbatim)).finish == {0: "stop"}


# -- Completions -----------------------------------------------------------------------------------


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
