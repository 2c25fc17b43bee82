from __future__ import annotations

import json
from typing import Any

import pytest

from backend.engine.grammar import GrammarCompiler
from backend.engine.grammar_spec import InvalidGrammar
from backend.tool_formats import ToolFormat, tool_format
from backend.tool_parser import CallParser
from plugins.events import ToolCallDelta
from tests.backend.scripted_model import FIRST_PIECE, ScriptTokenizer

TOKENIZER = ScriptTokenizer([{"special": "[TOOL_CALLS]"}])
COMPILER = GrammarCompiler(TOKENIZER)
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def tool(name: str, parameters: dict[str, Any] | None = None) -> dict[str, Any]:
    function = {"name": name, "description": "", "parameters": parameters or PARAMETERS}
    return {"type": "function", "function": function}


TOOLS = [tool("look"), tool("go", {"type": "object", "properties": {}}), tool("stay")]


def tokens(text: str) -> list[int]:
    before, found, after = text.partition("[TOOL_CALLS]")
    return [*before.encode(), *([FIRST_PIECE] if found else []), *after.encode()]


def takes(format_: ToolFormat, text: str, names: tuple[str, ...], parallel: bool = True) -> bool:
    """Whether the grammar lets the text through, and it may end there."""
    spec = format_.grammar(TOOLS, names, parallel=parallel)
    matcher = COMPILER.compile(spec).start()._matcher
    ids = tokens(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


HERMES = tool_format("{{ tools }}<tool_call>", TOKENIZER)
MISTRAL = tool_format("{{ tools }}[TOOL_CALLS]", TOKENIZER)
LLAMA = tool_format("{{ tools }}<|python_tag|>", TOKENIZER)
PYTHONIC = tool_format("{{ tools }}<|python_tag|> [func_name1(params)]", TOKENIZER)
NONE = tool_format("{{ messages }}", TOKENIZER)


@pytest.mark.parametrize(
    ("format_", "notation", "in_template"),
    [
        (HERMES, "hermes", True),
        (MISTRAL, "mistral", True),
        (LLAMA, "llama", True),
        (PYTHONIC, "pythonic", True),
        (NONE, "hermes", False),
    ],
)
def test_the_notation_is_read_off_the_template(
    format_: ToolFormat, notation: str, in_template: bool
) -> None:
    assert (format_.notation, format_.in_template) == (notation, in_template)


def test_only_special_tokens_are_markers() -> None:
    assert MISTRAL.markers == {FIRST_PIECE: b"[TOOL_CALLS]"}
    assert HERMES.markers == {}


CALLS = [
    (HERMES, '<tool_call>\n{"name": "look", "arguments": {"a": 1}}\n</tool_call>'),
    (NONE, '<tool_call>\n{"name": "look", "arguments": {"a":1}}\n</tool_call>'),
    (MISTRAL, '[TOOL_CALLS][{"name": "look", "arguments": {"a": 1}}]'),
    (LLAMA, '{"name": "look", "parameters": {"a": 1}}'),
    (PYTHONIC, '{"name": "look", "parameters": {"a": 1}}'),
]


@pytest.mark.parametrize(("format_", "text"), CALLS)
def test_a_call_that_must_be_made_is_in_the_models_own_notation(
    format_: ToolFormat, text: str
) -> None:
    assert takes(format_, text, ("look", "go"))
    assert takes(format_, text, ("look",), parallel=False)
    assert not takes(format_, text, ("go",))
    assert not takes(format_, "Sure! " + text, ("look",))
    assert not takes(format_, text.replace("1", '"x"'), ("look",))
    parser = CallParser(format_.notation, frozenset(["look"]))
    events = parser.feed(text) + parser.finish()
    assert isinstance(events[0], ToolCallDelta)
    assert events[0].name == "look"


@pytest.mark.parametrize(
    ("format_", "text"),
    [
        (HERMES, '<tool_call>\n{"name": "go", "arguments": {}}\n</tool_call>\n' * 2),
        (MISTRAL, '[TOOL_CALLS][{"name": "go", "arguments": {}}, {"name": "go", "arguments": {}}]'),
    ],
)
def test_several_calls_are_legal_unless_they_are_refused(format_: ToolFormat, text: str) -> None:
    assert takes(format_, text.rstrip("\n"), ("go",))
    assert not takes(format_, text.rstrip("\n"), ("go",), parallel=False)


def test_arguments_that_a_tool_does_not_have_are_not_legal() -> None:
    assert not takes(LLAMA, '{"name": "go", "parameters": {"a": 1}}', ("go",))


def test_a_tool_whose_schema_is_broken_is_refused_by_the_field() -> None:
    broken = [tool("look", {"type": "object", "properties": {"a": {"$ref": "#/$defs/no"}}})]
    spec = LLAMA.grammar(broken, ["look"], parallel=True)
    assert spec.param == "tools"
    with pytest.raises(InvalidGrammar, match=r"\$defs/no"):
        COMPILER.compile(spec)


HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "Look."},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "call_1", "function": {"name": "look", "arguments": '{"a": 1}'}},
            {"id": "call_2", "function": {"name": "go", "arguments": "{}"}},
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "a tree"},
    {"role": "tool", "tool_call_id": "call_2", "content": "gone"},
]


def test_a_template_that_knows_tools_gets_them_as_they_are() -> None:
    assert HERMES.forms(HISTORY, TOOLS) == [(HISTORY, TOOLS)]


def test_a_template_that_knows_no_tools_is_told_in_words() -> None:
    (messages, tools), _ = NONE.forms(HISTORY, TOOLS)
    assert tools is None
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "user"]
    for entry in TOOLS:
        assert json.dumps(entry["function"]) in messages[0]["content"]
    assert messages[2]["content"] == (
        '<tool_call>\n{"name": "look", "arguments": {"a": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "go", "arguments": {}}\n</tool_call>'
    )
    assert "a tree" in messages[3]["content"]
    assert "gone" in messages[3]["content"]


def test_words_about_tools_join_the_system_message_that_is_there() -> None:
    (messages, _), _ = NONE.forms([{"role": "system", "content": "Be brief."}, *HISTORY], TOOLS)
    assert messages[0]["content"].startswith("Be brief.\n\n")
    assert [m["role"] for m in messages].count("system") == 1


def test_a_template_without_a_system_role_is_told_by_the_user() -> None:
    _, (messages, _) = NONE.forms(HISTORY, TOOLS)
    assert messages[0]["role"] == "user"
    assert messages[0]["content"].endswith("Look.")
    assert '"name": "stay"' in messages[0]["content"]


def test_old_calls_are_told_in_words_without_tools_too() -> None:
    ((messages, tools),) = NONE.forms(HISTORY, None)
    assert tools is None
    assert [m["role"] for m in messages] == ["user", "assistant", "user"]


def test_mistrals_call_ids_have_nine_letters_and_still_belong_together() -> None:
    ((messages, _),) = MISTRAL.forms(HISTORY, TOOLS)
    ids = [call["id"] for call in messages[1]["tool_calls"]]
    assert all(len(call_id) == 9 and call_id.isalnum() for call_id in ids)
    assert [messages[2]["tool_call_id"], messages[3]["tool_call_id"]] == ids
    assert HISTORY[1]["tool_calls"][0]["id"] == "call_1"
