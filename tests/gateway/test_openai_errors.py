"""Bad bodies: refused in OpenAI's words, with param and code; nothing else ever comes out of the decoders."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.endpoints.chat import ChatEndpoint
from gateway.endpoints.json_body import MAX_DEPTH
from plugins.errors import InvalidRequest, ModelNotFound, RateLimited
from plugins.events import Message, Request
from tests.gateway.chat_bodies import CALL, CALLING, OPTIONAL_FIELDS, USER, WEATHER, chat_request


def decode(body: bytes) -> Request:
    return ChatEndpoint().decode(body, "req_1", 0.0)


def messages(*bodies: Any) -> list[Message]:
    return chat_request(messages=list(bodies)).messages


def refusal(**fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        chat_request(**fields)
    assert caught.value.status == 400
    assert caught.value.type == "invalid_request_error"
    return caught.value


def refusal_of(body: bytes) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        decode(body)
    return caught.value


# -- Refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"temperature": "hot"}, "temperature", "invalid_type"),
        ({"temperature": True}, "temperature", "invalid_type"),
        ({"temperature": 2.1}, "temperature", "decimal_above_max_value"),
        ({"temperature": -0.1}, "temperature", "decimal_below_min_value"),
        ({"top_p": 1.1}, "top_p", "decimal_above_max_value"),
        ({"top_p": -0.1}, "top_p", "decimal_below_min_value"),
        ({"presence_penalty": 3}, "presence_penalty", "decimal_above_max_value"),
        ({"frequency_penalty": -2.5}, "frequency_penalty", "decimal_below_min_value"),
        ({"repetition_penalty": 0}, "repetition_penalty", "decimal_below_min_value"),
        ({"n": 0}, "n", "integer_below_min_value"),
        ({"n": 129}, "n", "integer_above_max_value"),
        ({"n": "2"}, "n", "invalid_type"),
        ({"max_tokens": 0}, "max_tokens", "integer_below_min_value"),
        ({"max_tokens": 3.5}, "max_tokens", "invalid_type"),
        ({"max_tokens": "ten"}, "max_tokens", "invalid_type"),
        ({"max_completion_tokens": -1}, "max_completion_tokens", "integer_below_min_value"),
        ({"seed": 2**63}, "seed", "integer_above_max_value"),
        ({"seed": -(2**63) - 1}, "seed", "integer_below_min_value"),
        ({"seed": 2**70}, "seed", "integer_above_max_value"),
        ({"stream": "yes"}, "stream", "invalid_type"),
        ({"stream": 1}, "stream", "invalid_type"),
        ({"stop": ["1", "2", "3", "4", "5"]}, "stop", "array_above_max_length"),
        ({"stop": ["a", 7]}, "stop[1]", "invalid_type"),
        ({"stop": 7}, "stop", "invalid_type"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "integer_above_max_value"),
        ({"top_logprobs": 2}, "top_logprobs", "invalid_value"),
        ({"logit_bias": {"5": 101}}, "logit_bias", "decimal_above_max_value"),
        ({"logit_bias": {"-1": 1}}, "logit_bias", "integer_below_min_value"),
        ({"logit_bias": {"hello": 1}}, "logit_bias", "invalid_type"),
        ({"logit_bias": {"5": "-100"}}, "logit_bias", "invalid_type"),
        ({"logit_bias": [5]}, "logit_bias", "invalid_type"),
        ({"stream_options": {"include_usage": True}}, "stream_options", None),
        ({"metadata": {f"k{i}": "v" for i in range(17)}}, "metadata", "object_above_max_length"),
        ({"metadata": {"k": "v" * 513}}, "metadata", "string_above_max_length"),
        ({"metadata": {"k" * 65: "v"}}, "metadata", "string_above_max_length"),
        ({"service_tier": "warp"}, "service_tier", "invalid_value"),
        ({"model": 5}, "model", "invalid_type"),
        ({"model": None}, None, None),
        ({"model": ""}, None, None),
        ({"messages": None}, "messages", "missing_required_parameter"),
        ({"messages": []}, "messages", "empty_array"),
        ({"messages": "hi"}, "messages", "invalid_type"),
        ({"messages": [USER, "hi"]}, "messages[1]", "invalid_type"),
        ({"messages": [{}]}, "messages[0].role", "missing_required_parameter"),
        ({"messages": [USER, {"role": "wizard"}]}, "messages[1].role", "invalid_value"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "missing_required_parameter"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content", "empty_array"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "invalid_type"),
        (
            {"messages": [{"role": "user", "content": {"text": "hi"}}]},
            "messages[0].content",
            "invalid_type",
        ),
        (
            {"messages": [{"role": "user", "content": ["hi"]}]},
            "messages[0].content[0]",
            "invalid_type",
        ),
        (
            {"messages": [{"role": "user", "content": [{"text": "hi"}]}]},
            "messages[0].content[0].type",
            "missing_required_parameter",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0].text",
            "missing_required_parameter",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "hologram"}]}]},
            "messages[0].content[0].type",
            "invalid_value",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": "data:x"}]}
                ]
            },
            "messages[0].content[0].image_url.url",
            "invalid_value",
        ),
        (
            {"messages": [USER, {"role": "tool", "content": "y"}]},
            "messages[1].tool_call_id",
            "missing_required_parameter",
        ),
        ({"tools": "x"}, "tools", "invalid_type"),
        ({"tools": [WEATHER] * 129}, "tools", "array_above_max_length"),
        (
            {"tools": [{"type": "function", "function": {}}]},
            "tools[0].function.name",
            "missing_required_parameter",
        ),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "missing_required_parameter"),
        ({"tools": [{"type": "magic"}]}, "tools[0].type", "invalid_value"),
        (
            {"tools": [{"type": "function", "function": {"name": "bad name!"}}]},
            "tools[0].function.name",
            "invalid_value",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "x" * 65}}]},
            "tools[0].function.name",
            "string_above_max_length",
        ),
        ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "f"}}},
            "tool_choice",
            "invalid_value",
        ),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "function"}},
            "tool_choice.function",
            "missing_required_parameter",
        ),
        (
            {"messages": [USER | {"content": [{"type": "image_url", "image_url": "data:,AA"}]}]},
            "messages[0].content[0].image_url.url",
            "invalid_value",
        ),
        (
            {
                "messages": [
                    USER | {"content": [{"type": "image_url", "image_url": "data:a/b;base64"}]}
                ]
            },
            "messages[0].content[0].image_url.url",
            "invalid_value",
        ),
        ({"tools": [WEATHER], "tool_choice": "sometimes"}, "tool_choice", "invalid_value"),
        (
            {
                "tools": [WEATHER],
                "tool_choice": {"type": "function", "function": {"name": "nope"}},
            },
            "tool_choice",
            "invalid_value",
        ),
        (
            {
                "tools": [WEATHER],
                "tool_choice": {"allowed_tools": {"mode": "never", "tools": []}},
            },
            "tool_choice.allowed_tools.mode",
            "invalid_value",
        ),
        ({"response_format": {"type": "yaml"}}, "response_format", "invalid_value"),
        ({"response_format": {"type": "regex"}}, "response_format", "invalid_value"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a b", "schema": {}},
                }
            },
            "response_format",
            "invalid_value",
        ),
        (
            {"messages": [USER | {"content": [{"type": "file"}]}]},
            "messages[0].content[0].file",
            "missing_required_parameter",
        ),
        (
            {"messages": [USER | {"content": [{"type": "file", "file": {"filename": "a"}}]}]},
            "messages[0].content[0].file.file_id",
            "missing_required_parameter",
        ),
        (
            {"messages": [USER | {"content": [{"type": "input_audio"}]}]},
            "messages[0].content[0].input_audio",
            "missing_required_parameter",
        ),
        (
            {"messages": [USER | {"content": [{"type": "image_url"}]}]},
            "messages[0].content[0].image_url",
            "missing_required_parameter",
        ),
        (
            {"messages": [USER, CALLING | {"tool_calls": [{"id": "c"}]}]},
            "messages[1].tool_calls[0].function",
            "missing_required_parameter",
        ),
        (
            {"messages": [USER, {"role": "function", "name": "f", "content": "x"}]},
            "messages[1].role",
            None,
        ),
        (
            {"messages": [USER, {"role": "function", "content": "x"}]},
            "messages[1].name",
            "missing_required_parameter",
        ),
        (
            {
                "messages": [
                    USER,
                    CALLING,
                    {
                        "role": "tool",
                        "tool_call_id": "call_1",
                        "content": [{"type": "refusal", "refusal": "x"}],
                    },
                ]
            },
            "messages[2].content[0]",
            "invalid_value",
        ),
        (
            {"messages": [USER, CALLING, {"role": "tool", "tool_call_id": "call_1"}]},
            "messages[2].content",
            "missing_required_parameter",
        ),
        (
            {
                "messages": [
                    USER,
                    {"role": "assistant", "thinking_blocks": [{"type": "dreaming"}]},
                ]
            },
            "messages[1].thinking_blocks[0].type",
            "invalid_value",
        ),
        (
            {"response_format": {"type": "json_schema"}},
            "response_format",
            "missing_required_parameter",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
            "response_format",
            "missing_required_parameter",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
            "response_format",
            "missing_required_parameter",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {
                        "name": "a",
                        "schema": {"properties": {"b": {"items": {"type": "strnig"}}}},
                    },
                }
            },
            "response_format",
            "invalid_value",
        ),
    ],
    ids=lambda value: json.dumps(value)[:60],
)
def test_a_bad_value_is_refused_with_its_place_and_code(
    fields: dict[str, Any], param: str | None, code: str | None
) -> None:
    error = refusal(**fields)
    assert (error.param, error.code) == (param, code)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"temperature": "hot"},
            "Invalid type for 'temperature': expected a decimal, but got a string instead.",
        ),
        (
            {"n": 0},
            "Invalid 'n': integer below minimum value. Expected a value >= 1, but got 0 instead.",
        ),
        (
            {"temperature": 3},
            "Invalid 'temperature': decimal above maximum value. Expected a value <= 2, but got 3 instead.",
        ),
        (
            {"stop": list("abcde")},
            "Invalid 'stop': array too long. Expected an array with maximum length 4, but got an array with "
            "length 5 instead.",
        ),
        (
            {"messages": []},
            "Invalid 'messages': empty array. Expected an array with minimum length 1, but got an empty array "
            "instead.",
        ),
        ({"messages": None}, "Missing required parameter: 'messages'."),
        ({"model": None}, "you must provide a model parameter"),
        (
            {"messages": [{"role": "wizard"}]},
            "Invalid value: 'wizard'. Supported values are: 'system', 'developer', 'user', 'assistant', 'tool' and "
            "'function'.",
        ),
        (
            {"messages": [USER | {"content": 5}]},
            "Invalid type for 'messages[0].content': expected one of a string or an array, but got an integer "
            "instead.",
        ),
        (
            {"stream_options": {}},
            "The 'stream_options' parameter is only allowed when 'stream' is enabled.",
        ),
    ],
)
def test_refusals_are_worded_as_clients_know_them(fields: dict[str, Any], message: str) -> None:
    assert refusal(**fields).message == message


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"type": "strnig"}, "context=()"),
        ({"type": ["string", 5]}, "context=()"),
        ({"properties": {"a": 5}}, "context=('properties', 'a')"),
        ({"items": [{}, {"type": "x"}]}, "context=('items', '1')"),
        ({"$defs": {"b": {"anyOf": [{"type": "x"}]}}}, "context=('$defs', 'b', 'anyOf', '0')"),
        ({"additionalProperties": {"type": "x"}}, "context=('additionalProperties',)"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_bad_schema_is_refused_with_its_place(schema: dict[str, Any], place: str) -> None:
    body = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    error = refusal(response_format=body)
    assert (error.param, place in error.message) == ("response_format", True)


def test_a_huge_value_is_not_repeated_whole() -> None:
    assert len(refusal(messages=[{"role": "x" * 10_000, "content": ""}]).message) < 300


def test_a_result_for_no_call_is_refused() -> None:
    error = refusal(messages=[USER, {"role": "tool", "tool_call_id": "call_x", "content": "?"}])
    assert error.param == "messages[1].role"


def test_a_result_after_another_turn_is_refused() -> None:
    result = {"role": "tool", "tool_call_id": "call_1", "content": "x"}
    error = refusal(messages=[USER, CALLING, USER, result])
    assert (error.param, "call_1" in error.message) == ("messages[2].role", True)


def test_a_body_that_is_no_object_is_called_so() -> None:
    message = "Invalid request body: expected a JSON object, but got an array instead."
    assert refusal_of(b"[]").message == message


def test_a_result_for_another_call_is_refused() -> None:
    result = {"role": "tool", "tool_call_id": "call_x", "content": "?"}
    assert refusal(messages=[USER, CALLING, result]).param == "messages[2].tool_call_id"


@pytest.mark.parametrize("following", [[USER], []], ids=["user turn", "end"])
def test_a_call_without_its_result_is_refused_and_named(following: list[Any]) -> None:
    calls = CALLING | {"tool_calls": [CALL, CALL | {"id": "call_2"}]}
    result = {"role": "tool", "tool_call_id": "call_1", "content": "x"}
    error = refusal(messages=[USER, calls, result, *following])
    assert error.message.endswith("response messages: call_2")
    assert error.param == f"messages[{2 + len(following)}].role"


# -- Bodies ----------------------------------------------------------------------------------------------------------

GOOD = b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b'"hi"',
        b"null",
        b"5",
        GOOD[:-1],
        GOOD + GOOD,
        GOOD + b" x",
        GOOD[:-1] + b",}",
        GOOD[:-1] + b',"temperature":NaN}',
        GOOD[:-1] + b',"temperature":Infinity}',
        GOOD[:-1] + b',"temperature":1e999}',
        GOOD[:-1] + b',"x":1e999}',
        GOOD[:-1] + b',"seed":' + b"9" * 5000 + b"}",
        GOOD.replace(b"hi", b"a\xffb"),
        GOOD.replace(b"hi", b"\xc4\xe3\xba\xc3"),
        GOOD.replace(b"hi", b"\\ud800"),
        GOOD.replace(b'"content"', b'"id":"a\xffb","content"'),
        GOOD.decode().encode("utf-16"),
        b"model=m&messages=hi",
    ],
    ids=lambda body: repr(body[-24:]),
)
def test_a_bad_body_is_refused(body: bytes) -> None:
    error = refusal_of(body)
    assert (error.status, error.param if b"temperature" not in body else None) == (400, None)


def test_a_byte_order_mark_is_skipped_and_not_forwarded() -> None:
    assert decode(b"\xef\xbb\xbf" + GOOD).body == GOOD


def test_of_a_key_that_stands_twice_the_last_one_holds() -> None:
    assert decode(b'{"model":"other",' + GOOD[1:]).model == "m"


def nested(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


@pytest.mark.parametrize("depth", [MAX_DEPTH, 900, 20_000])
@pytest.mark.parametrize(
    "body",
    [
        GOOD[:-1] + b',"x":%s}',
        GOOD[:-1] + b',"x":{"y":%s}}',
        GOOD.replace(b'"content"', b'"x":%s,"content"'),
        GOOD[:-1]
        + b',"tools":[{"type":"function","function":{"name":"f","parameters":{"x":%s}}}]}',
        GOOD[:-1] + b',"temperature":%s}',
        b"%s",
    ],
    ids=["unknown field", "inside an object", "message", "tool", "typed field", "whole body"],
)
def test_deep_nesting_is_refused_wherever_it_stands(body: bytes, depth: int) -> None:
    assert refusal_of(body % nested(depth)).status == 400


def test_nesting_below_the_limit_passes() -> None:
    depth = MAX_DEPTH - 2
    body = GOOD[:-1] + b',"x":' + nested(depth) + b',"y":' + nested(depth) + b"}"
    assert set(decode(body).extra) == {"x", "y"}


def test_the_limit_is_exact_in_the_last_of_many_messages() -> None:
    deepest = MAX_DEPTH - 3  # below body, list and message
    body = GOOD.replace(b'{"role"', b'{"role":"user","content":"a"},{"role"')
    body = body.replace(b'"content":"hi"', b'"content":"hi","x":%s')
    assert len(decode(body % nested(deepest)).messages) == 2
    assert refusal_of(body % nested(deepest + 1)).param == "messages"


def test_many_empty_lists_in_one_object_are_not_deep() -> None:
    entries = {f"k{i}": [] for i in range(200)}
    assert chat_request(x=entries).extra == {"x": entries}


def test_many_brackets_side_by_side_are_not_deep() -> None:
    code = "if (x) { y[i] = {}; }\n" * 200
    history = [USER, {"role": "assistant", "content": code}] * 100
    assert len(messages(*history, {"role": "user", "content": code})) == 201


SUITE = [
    json.loads(line)
    for line in (Path(__file__).parent / "data" / "json_parsing.jsonl").read_text().splitlines()
]


@pytest.mark.parametrize("case", SUITE, ids=lambda case: case["name"])
def test_no_file_of_the_json_parsing_suite_is_a_request(case: dict[str, str]) -> None:
    assert refusal_of(base64.b64decode(case["b64"])).status == 400


@pytest.mark.parametrize(
    "case", [case for case in SUITE if case["expect"] == "accept"], ids=lambda case: case["name"]
)
def test_good_json_is_kept_in_an_unknown_field(case: dict[str, str]) -> None:
    text = base64.b64decode(case["b64"])
    expected = json.loads(text)
    extra = decode(GOOD[:-1] + b',"x":' + text + b"}").extra
    assert extra == ({} if expected is None else {"x": expected})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)
FIELDS = st.sampled_from([*OPTIONAL_FIELDS, "model", "messages", "prompt", "x"])
MESSAGE_FIELDS = st.sampled_from(
    [
        "role",
        "content",
        "name",
        "tool_calls",
        "tool_call_id",
        "function_call",
        "refusal",
        "reasoning_content",
        "thinking_blocks",
    ]
)
ROLES = st.sampled_from(["system", "user", "assistant", "tool", "function", "developer"])
PARTS = st.lists(
    st.dictionaries(
        st.sampled_from(
            ["type", "text", "image_url", "input_audio", "file", "refusal", "cache_control"]
        ),
        st.sampled_from(["text", "image_url", "file", "refusal", "data:a"]) | JSON,
        max_size=4,
    ),
    max_size=3,
)
MESSAGES = st.lists(
    st.dictionaries(MESSAGE_FIELDS, st.text(max_size=8) | PARTS | JSON, max_size=5).flatmap(
        lambda body: ROLES.map(lambda role: {"role": role, "content": "x"} | body)
    ),
    max_size=4,
)


@given(st.binary(max_size=200))
def test_any_bytes_give_a_request_or_a_refusal(body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        decode(body)


@given(st.dictionaries(FIELDS, JSON, max_size=6), MESSAGES | JSON)
def test_any_json_gives_a_request_or_a_refusal(fields: dict[str, Any], messages: Any) -> None:
    body = {"model": "m", "messages": messages} | fields
    try:
        assert decode(json.dumps(body).encode()).model
    except InvalidRequest as error:
        assert error.status == 400
        assert error.message


# -- The envelope ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (
            ModelNotFound("The model `x` does not exist."),
            {
                "message": "The model `x` does not exist.",
                "type": "invalid_request_error",
                "param": None,
                "code": "model_not_found",
            },
        ),
        (
            RateLimited('Slow "down"\n', type="tokens", param="max_tokens"),
            {
                "message": 'Slow "down"\n',
                "type": "tokens",
                "param": "max_tokens",
                "code": "rate_limit_exceeded",
            },
        ),
    ],
)
def test_an_error_body_has_all_four_keys(error: Any, expected: dict[str, Any]) -> None:
    assert json.loads(ChatEndpoint().error_body(error)) == {"error": expected}
