"""Tool calls as servers send them: whole, in pieces, without index, id or type."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from plugins.events import (
    Started,
    ToolCallDelta,
    Verbatim,
)
from tests.plugins.openai_answers import (
    DONE,
    STOP,
    chunk,
    see,
    sse,
)
from tests.plugins.openai_reading import (
    CALL,
    OBJECT_CALL,
    both_lanes,
    read_stream,
    tool_chunk,
    without,
)

# -- Tool calls ------------------------------------------------------------------------------------


def pieces_of_a_call() -> list[dict[str, Any]]:
    first = {**CALL, "function": {"name": "get_weather", "arguments": ""}}
    rest = [{"index": 0, "function": {"arguments": text}} for text in ('{"city"', ':"Oslo"}')]
    return [tool_chunk(first), *[chunk({"tool_calls": [piece]}) for piece in rest]]


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


def test_a_thought_signature_stays_with_its_call() -> None:
    call = {**CALL, "extra_content": {"google": {"thought_signature": "s"}}}
    events, _ = read_stream(sse(tool_chunk(call), DONE), verbatim=False)
    assert [e.signature for e in events if isinstance(e, ToolCallDelta)] == ["s"]
