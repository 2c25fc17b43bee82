from __future__ import annotations

from typing import Any

import pytest

from backend.answer_form import grammar_spec
from backend.engine.grammar_spec import GrammarSpec
from backend.request import to_generate
from plugins.errors import InvalidRequest
from plugins.events import Message, Request, ResponseFormat, Text

OBJECT = '{"type": "object"}'


def chat(**fields: Any) -> Request:
    return Request("r", "chat", "m", [Message("user", [Text("hi")])], **fields)


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        (None, None),
        (ResponseFormat("text"), None),
        (ResponseFormat("json_object"), GrammarSpec("json_schema", OBJECT)),
        (
            ResponseFormat("json_schema", {"type": "string"}, "n", strict=True),
            GrammarSpec("json_schema", '{"type": "string"}'),
        ),
        (
            ResponseFormat("json_schema", {"type": "object"}, "n"),
            GrammarSpec("json_schema", OBJECT, lenient=True),
        ),
        (ResponseFormat("regex", pattern="a+"), GrammarSpec("regex", "a+")),
        (ResponseFormat("grammar", pattern="start: X"), GrammarSpec("lark", "start: X")),
    ],
    ids=str,
)
def test_a_response_format_is_a_grammar(
    form: ResponseFormat | None, expected: GrammarSpec | None
) -> None:
    assert grammar_spec(chat(response_format=form)) == expected
    assert to_generate(chat(response_format=form)).grammar == expected


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ({"guided_json": {"type": "object"}}, ("json_schema", OBJECT, "guided_json", True)),
        ({"guided_json": OBJECT}, ("json_schema", OBJECT, "guided_json", True)),
        ({"guided_regex": "a+"}, ("regex", "a+", "guided_regex")),
        ({"guided_choice": ["a", "b"]}, ("choice", '["a", "b"]', "guided_choice")),
        ({"guided_grammar": "root ::= x"}, ("lark", "root ::= x", "guided_grammar")),
        (
            {"structured_outputs": {"regex": "a+"}},
            ("regex", "a+", "structured_outputs.regex"),
        ),
        (
            {"structured_outputs": {"json_object": True}},
            ("json_schema", OBJECT, "structured_outputs.json_object"),
        ),
    ],
    ids=str,
)
def test_other_servers_fields_are_grammars_too(
    extra: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    assert grammar_spec(chat(extra=extra)) == GrammarSpec(*expected)


@pytest.mark.parametrize(
    "extra", [{"guided_json": None}, {"structured_outputs": {"json_object": False}}], ids=str
)
def test_an_empty_field_asks_for_nothing(extra: dict[str, Any]) -> None:
    assert grammar_spec(chat(extra=extra)) is None


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": [1]}, "guided_json"),
        ({"guided_choice": "a"}, "guided_choice"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": [1]}, "guided_choice"),
        ({"guided_regex": 5}, "guided_regex"),
        ({"structured_outputs": "json"}, "structured_outputs"),
        ({"structured_outputs": {"grammar": {}, "regex": 1}}, "structured_outputs.regex"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
    ],
    ids=str,
)
def test_a_field_of_the_wrong_form_is_refused_by_name(extra: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        grammar_spec(chat(extra=extra))
    assert refused.value.param == param
    assert param in str(refused.value)


CLOSED = {"type": "object", "properties": {}, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "context"),
    [
        ({"type": "object"}, "()"),
        ({**CLOSED, "additionalProperties": True}, "()"),
        ({**CLOSED, "properties": {"a": {"type": "object"}}}, "('properties', 'a')"),
        ({"type": "array", "items": {"type": "object"}}, "('items',)"),
        ({"anyOf": [CLOSED, {"type": "object"}]}, "('anyOf', '1')"),
        ({**CLOSED, "$defs": {"x": {"type": "object"}}}, "('$defs', 'x')"),
    ],
    ids=str,
)
def test_a_strict_schema_must_close_its_objects(schema: dict[str, Any], context: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        grammar_spec(chat(response_format=ResponseFormat("json_schema", schema, "n", strict=True)))
    assert f"In context={context}, 'additionalProperties' is required" in str(refused.value)
    assert refused.value.param == "response_format"


def test_a_property_may_be_called_like_a_keyword() -> None:
    schema = {**CLOSED, "properties": {"type": {"enum": ["object"]}, "items": {"const": 1}}}
    assert grammar_spec(chat(response_format=ResponseFormat("json_schema", schema, strict=True)))


def test_a_form_and_a_guided_field_cannot_be_used_together() -> None:
    request = chat(response_format=ResponseFormat("json_object"), extra={"guided_regex": "a"})
    with pytest.raises(InvalidRequest, match="response_format and guided_regex"):
        grammar_spec(request)
