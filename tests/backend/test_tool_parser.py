from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.tool_parser import CallParser, new_call_id
from plugins.events import Event, TextDelta, ToolCallDelta

NAMES = frozenset({"look", "go"})
Calls = list[tuple[str, str]]
CASES: list[tuple[str, str, str, Calls]] = [
    (
        "hermes",
        'Sure.\n\n<tool_call>\n{"name": "look", "arguments": {"a": "}\\" {"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "go", "arguments": {}}\n</tool_call>',
        "Sure.",
        [("look", '{"a": "}\\" {"}'), ("go", "{}")],
    ),
    (
        "hermes",
        '<tool_call>{"arguments": {"é": 1}, "name": "look"}</tool_call>',
        "",
        [("look", '{"é": 1}')],
    ),
    (
        "hermes",
        '<tool_call>[{"name": "look", "arguments": {}}, {"name": "go", "arguments": {}}]</tool_call>',
        "",
        [("look", "{}"), ("go", "{}")],
    ),
    ("hermes", '<tool_call>{"name": "look"}</tool_call>', "", [("look", "{}")]),
    ("hermes", "a < b, <tool_cal l> and <tool_", "a < b, <tool_cal l> and <tool_", []),
    ("hermes", "two lines\n\n", "two lines\n\n", []),
    ("hermes", "<tool_call>nonsense</tool_call> x", "<tool_call>nonsense</tool_call> x", []),
    ("hermes", '<tool_call>{"foo": 1}</tool_call>', '<tool_call>{"foo": 1}</tool_call>', []),
    ("hermes", '<tool_call>{"name": "look", "argum', '<tool_call>{"name": "look", "argum', []),
    (
        "hermes",
        '<tool_call>{"name": "look", "arguments": {"a": 1',
        "",
        [("look", '{"a": 1')],
    ),
    (
        "hermes",
        '<tool_call>{"name": "go", "arguments": {}}</tool_call>\n\nDone.',
        "\n\nDone.",
        [("go", "{}")],
    ),
    ("llama", '{"name": "go", "parameters": {"a": [{"b": 2}]}}', "", [("go", '{"a": [{"b": 2}]}')]),
    (
        "llama",
        '<|python_tag|>{"name": "go", "parameters": {}}; {"name": "look", "parameters": {"x": 1}}',
        "",
        [("go", "{}"), ("look", '{"x": 1}')],
    ),
    (
        "llama",
        '{"type": "function", "name": "go", "parameters": {"q": 1}}',
        "",
        [("go", '{"q": 1}')],
    ),
    (
        "llama",
        '{"type": "function", "function": {"name": "go", "parameters": {"q": 1}}}',
        "",
        [("go", '{"q": 1}')],
    ),
    ("llama", '{"answer": 42}', '{"answer": 42}', []),
    ("llama", '{"name": "Bob", "parameters": {}}', '{"name": "Bob", "parameters": {}}', []),
    ("llama", '{"name": "Bob", "parameters": {"a', '{"name": "Bob", "parameters": {"a', []),
    ("llama", ' Hello {"name"', ' Hello {"name"', []),
    ("llama", "  ", "  ", []),
    (
        "mistral",
        '[TOOL_CALLS][{"name": "go", "arguments": {"a": 1}, "id": "123456789"}, '
        '{"name": "look", "arguments": "{\\"z\\": 1}"}]',
        "",
        [("go", '{"a": 1}'), ("look", '{"z": 1}')],
    ),
    ("mistral", "plain [TOOL] text", "plain [TOOL] text", []),
    (
        "pythonic",
        '[go(a=1, b="x", c=[True, None]), look()]',
        "",
        [("go", '{"a": 1, "b": "x", "c": [true, null]}'), ("look", "{}")],
    ),
    ("pythonic", '{"name": "go", "parameters": {}}', "", [("go", "{}")]),
    ("pythonic", "[1, 2]", "[1, 2]", []),
    ("pythonic", "[go(1)]", "[go(1)]", []),
    ("pythonic", "[quit()]", "[quit()]", []),
    ("pythonic", "[go(a=open('x'))]", "[go(a=open('x'))]", []),
    ("pythonic", "[go(a=1)", "[go(a=1)", []),
    ("pythonic", "[", "[", []),
]


def parse(parser: CallParser, pieces: list[str]) -> tuple[str, Calls, list[Event]]:
    events = [event for piece in pieces for event in parser.feed(piece)] + parser.finish()
    text = "".join(e.text for e in events if isinstance(e, TextDelta))
    calls: dict[int, tuple[str, str]] = {}
    for event in events:
        if isinstance(event, ToolCallDelta):
            name, arguments = calls.get(event.index, ("", ""))
            calls[event.index] = name + (event.name or ""), arguments + event.arguments
    return text, list(calls.values()), events


@pytest.mark.parametrize(("notation", "text", "content", "calls"), CASES)
@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_calls_and_text_are_told_apart_however_the_text_is_cut(
    notation: str, text: str, content: str, calls: Calls, size: int
) -> None:
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    assert parse(CallParser(notation, NAMES), pieces)[:2] == (content, calls)


PARTS = [
    *[
        "<tool_call>",
        "</tool_call>",
        "[TOOL_CALLS]",
        "<|python_tag|>",
        '{"name":"go",',
        "}",
        "}",
        "[",
        "]",
        "x",
    ]
]
PARTS += ['"arguments": {', '"parameters": {', "\n", " ", '"', "\\"]


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(["hermes", "llama", "mistral", "pythonic"]),
    st.lists(
        st.sampled_from(PARTS),
        max_size=12,
    ),
    st.integers(1, 9),
)
def test_any_text_gives_the_same_whole_or_in_pieces(
    notation: str, parts: list[str], size: int
) -> None:
    text = "".join(parts)
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    whole = parse(CallParser(notation, NAMES), [text])
    assert parse(CallParser(notation, NAMES), pieces)[:2] == whole[:2]
    if "name" not in text:
        assert whole[1] == []


def test_id_and_name_come_once_and_first_and_arguments_in_pieces() -> None:
    text = '<tool_call>\n{"name": "go", "arguments": {"a": 1}}\n</tool_call>'
    _, _, events = parse(CallParser("hermes", NAMES, 3, new_id=lambda: "call_1"), list(text))
    assert events[0] == ToolCallDelta(0, 3, "call_1", "go", "")
    assert "".join(e.arguments for e in events[1:] if isinstance(e, ToolCallDelta)) == '{"a": 1}'
    assert len(events) == 1 + len('{"a": 1}')


def test_at_most_as_many_calls_as_asked_for_come_out() -> None:
    text = '<tool_call>{"name": "go", "arguments": {}}</tool_call>' * 3
    parser = CallParser("hermes", NAMES, max_calls=1)
    assert parse(parser, [text])[1] == [("go", "{}")]


def test_call_ids_are_of_openais_form_and_differ() -> None:
    ids = {new_call_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(re.fullmatch("call_[a-zA-Z0-9]{24}", call_id) for call_id in ids)
