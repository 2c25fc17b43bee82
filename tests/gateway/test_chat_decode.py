"""Chat bodies -> Request: every form that clients send."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.endpoints.chat import ChatEndpoint
from plugins.events import (
    Media,
    Message,
    Reasoning,
    Refusal,
    Request,
    ResponseFormat,
    Text,
    Tool,
    ToolCall,
    ToolChoice,
    ToolResult,
)
from tests.gateway.chat_bodies import CALL, CALLING, OPTIONAL_FIELDS, USER, WEATHER, chat_request


def messages(*bodies: Any) -> list[Message]:
    return chat_request(messages=list(bodies)).messages


# -- The whole request -----------------------------------------------------------------------------------------------


def test_a_plain_body_gives_a_plain_request() -> None:
    body = b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'
    assert ChatEndpoint().decode(body, "req_9", 4.5) == Request(
        id="req_9",
        dialect="chat",
        model="m",
        messages=[Message("user", [Text("hi")])],
        body=body,
        received_s=4.5,
    )


def test_null_is_the_same_as_absent_for_every_optional_field() -> None:
    nulls = chat_request(**dict.fromkeys(OPTIONAL_FIELDS))
    plain = chat_request()
    nulls.body = plain.body
    assert nulls == plain


@pytest.mark.parametrize("field", OPTIONAL_FIELDS)
def test_each_optional_field_may_be_null_alone(field: str) -> None:
    request = chat_request(**{field: None})
    request.body = b""
    assert request == Request("req_1", "chat", "m", messages=[Message("user", [Text("hi")])])


def test_zero_false_and_empty_are_values() -> None:
    request = chat_request(
        temperature=0, seed=0, presence_penalty=0, frequency_penalty=0, top_p=0, user=""
    )
    sampling = request.sampling
    assert (sampling.temperature, sampling.seed, sampling.top_p) == (0, 0, 0)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0, 0)
    assert request.user == ""


def test_every_sampling_field_reaches_its_place() -> None:
    fields: dict[str, Any] = {
        "temperature": 1.5,
        "top_p": 0.5,
        "n": 3,
        "seed": -1,
        "presence_penalty": -2,
        "frequency_penalty": 2,
        "top_k": 40,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "min_tokens": 2,
        "stop_token_ids": [7],
        "ignore_eos": True,
        "logprobs": True,
        "top_logprobs": 20,
        "max_tokens": 9,
    }
    sampling = chat_request(**fields).sampling
    assert {name: getattr(sampling, name) for name in fields} == fields


def test_top_level_fields_reach_the_request() -> None:
    request = chat_request(
        stream=True,
        stream_options={"include_usage": True, "include_obfuscation": False},
        parallel_tool_calls=False,
        reasoning_effort="low",
        metadata={"k": "v"},
        user="u1",
    )
    assert (request.stream, request.include_usage) == (True, True)
    assert request.parallel_tool_calls is False
    assert (request.reasoning_effort, request.metadata, request.user) == ("low", {"k": "v"}, "u1")


def test_unknown_fields_are_kept_as_extra_and_null_ones_dropped() -> None:
    request = chat_request(
        foo=1, chat_template_kwargs={"enable_thinking": False}, store=True, transforms=None
    )
    assert request.extra == {
        "foo": 1,
        "chat_template_kwargs": {"enable_thinking": False},
        "store": True,
    }


def test_unknown_fields_of_a_message_are_accepted() -> None:
    assert messages(USER | {"id": 5, "opts": {"visible": False}}) == [Message("user", [Text("hi")])]


@pytest.mark.parametrize(
    ("tier", "klass"),
    [
        ("auto", "standard"),
        ("default", "standard"),
        ("flex", "flex"),
        ("priority", "interactive"),
        ("fast", "interactive"),
    ],
)
def test_the_service_tier_chooses_the_class(tier: str, klass: str) -> None:
    request = chat_request(service_tier=tier)
    assert (request.service_tier, request.klass) == (tier, klass)


@pytest.mark.parametrize(
    ("caps", "expected"),
    [
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 6}, 6),
        ({"max_tokens": 80, "max_completion_tokens": 50}, 50),
        ({"max_tokens": 50, "max_completion_tokens": 80}, 50),
        ({"max_tokens": 3.0}, 3),
    ],
)
def test_both_names_of_the_cap_are_one(caps: dict[str, Any], expected: int) -> None:
    assert chat_request(**caps).sampling.max_tokens == expected


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 2},
        {"top_p": 1},
        {"n": 128},
        {"seed": 2**63 - 1},
        {"seed": -(2**63)},
        {"presence_penalty": 2, "frequency_penalty": -2},
        {"logit_bias": {"0": 100, "1": -100}},
        {"stop": ["a", "b", "c", "d"]},
        {"max_tokens": 1},
        {"top_k": -1},
        {"min_p": 1},
        {"metadata": {f"{i}".rjust(64): "v" * 512 for i in range(16)}},
        {"tools": [{"type": "function", "function": {"name": "x" * 64}}] * 128},
    ],
    ids=str,
)
def test_the_limits_themselves_are_allowed(fields: dict[str, Any]) -> None:
    assert chat_request(**fields).model == "m"


def test_logprobs_alone_ask_for_no_alternatives() -> None:
    sampling = chat_request(logprobs=True).sampling
    assert (sampling.logprobs, sampling.top_logprobs) == (True, 0)


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        ("\n", ["\n"]),
        (["a", "b"], ["a", "b"]),
        ("", []),
        ([], []),
        (["", "END"], ["END"]),
    ],
)
def test_stop_is_a_list_without_empty_strings(stop: object, expected: list[str]) -> None:
    assert chat_request(stop=stop).sampling.stop == expected


def test_logit_bias_has_token_ids_as_keys_and_takes_decimals() -> None:
    bias = chat_request(logit_bias={"5": 0.5, "7": -100}).sampling.logit_bias
    assert bias == {5: 0.5, 7: -100}
    assert chat_request(logit_bias={}).sampling.logit_bias is None


# -- Messages --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["system", "developer", "user"])
def test_roles_are_kept(role: str) -> None:
    assert messages({"role": role, "name": "ann", "content": "x"}) == [
        Message(role, [Text("x")], "ann")  # type: ignore[arg-type]
    ]


def test_text_parts_stay_apart_and_keep_their_cache_mark() -> None:
    mark = {"type": "ephemeral"}
    parts = [
        {"type": "text", "text": "one", "cache_control": None},
        {"type": "text", "text": "two", "cache_control": mark},
    ]
    assert messages({"role": "system", "content": parts}, USER)[0].parts == [
        Text("one"),
        Text("two", mark),
    ]


def test_a_cache_mark_on_the_message_falls_on_its_last_part() -> None:
    mark = {"type": "ephemeral"}
    assert messages(USER | {"cache_control": mark})[0].parts == [Text("hi", mark)]
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = {"role": "user", "content": parts, "cache_control": mark}
    assert messages(body)[0].parts == [Text("a"), Text("b", mark)]


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        (
            {"type": "image_url", "image_url": {"url": "https://x.example/a.png", "detail": "low"}},
            Media("image", url="https://x.example/a.png", detail="low"),
        ),
        (
            {"type": "image_url", "image_url": "data:image/png;base64,AAAA"},
            Media("image", data_base64="AAAA", media_type="image/png"),
        ),
        (
            {
                "type": "image_url",
                "image_url": {"url": "data:image/jpeg;charset=utf-8;base64,AA=="},
            },
            Media("image", data_base64="AA==", media_type="image/jpeg"),
        ),
        (
            {"type": "input_audio", "input_audio": {"data": "UklG", "format": "wav"}},
            Media("audio", data_base64="UklG", media_type="audio/wav"),
        ),
        ({"type": "file", "file": {"file_id": "file-1"}}, Media("file", file_id="file-1")),
        (
            {
                "type": "file",
                "file": {"filename": "a.pdf", "file_data": "data:application/pdf;base64,JVBE"},
            },
            Media("file", data_base64="JVBE", media_type="application/pdf", filename="a.pdf"),
        ),
    ],
)
def test_media_parts(part: dict[str, Any], expected: Media) -> None:
    assert messages({"role": "user", "content": [part]})[0].parts == [expected]


def test_a_tool_round_is_read() -> None:
    result = {"role": "tool", "tool_call_id": "call_1", "content": "15 C"}
    assert messages(USER, CALLING, result)[1:] == [
        Message("assistant", [ToolCall("call_1", "get_weather", '{"city": "Oslo"}')]),
        Message("tool", [ToolResult("call_1", [Text("15 C")])]),
    ]


def test_several_results_may_come_in_any_order() -> None:
    calls = [CALL, CALL | {"id": "call_2"}]
    results = [
        {"role": "tool", "tool_call_id": call_id, "content": "x"}
        for call_id in ("call_2", "call_1")
    ]
    read = messages(USER, CALLING | {"tool_calls": calls}, *results, USER)
    assert [message.role for message in read] == ["user", "assistant", "tool", "tool", "user"]


def test_a_tool_message_may_hold_parts_or_nothing() -> None:
    parts = [
        {"type": "text", "text": "screen"},
        {"type": "image_url", "image_url": "data:image/png;base64,AA=="},
    ]
    result = {"role": "tool", "tool_call_id": "call_1", "content": parts}
    assert messages(USER, CALLING, result)[2].parts == [
        ToolResult(
            "call_1", [Text("screen"), Media("image", data_base64="AA==", media_type="image/png")]
        )
    ]
    assert messages(USER, CALLING, result | {"content": []})[2].parts == [ToolResult("call_1")]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"a": 1}, '{"a":1}'),
        ({}, "{}"),
        ("", ""),
        (None, ""),
        ("{", "{"),
    ],
)
def test_arguments_of_history_become_text(arguments: object, expected: str) -> None:
    call = CALL | {"function": {"name": "f", "arguments": arguments}}
    result = {"role": "tool", "tool_call_id": "call_1", "content": "x"}
    read = messages(USER, CALLING | {"tool_calls": [call]}, result)
    assert read[1].parts == [ToolCall("call_1", "f", expected)]


def test_custom_calls_and_thought_signatures_of_history_are_kept() -> None:
    signed = CALL | {"extra_content": {"google": {"thought_signature": "c2ln"}}}
    custom = {"id": "call_2", "type": "custom", "custom": {"name": "sql", "input": "select 1"}}
    results = [
        {"role": "tool", "tool_call_id": call_id, "content": "x"}
        for call_id in ("call_1", "call_2")
    ]
    read = messages(USER, CALLING | {"tool_calls": [signed, custom]}, *results)
    assert read[1].parts == [
        ToolCall("call_1", "get_weather", '{"city": "Oslo"}', "c2ln"),
        ToolCall("call_2", "sql", "select 1", kind="custom"),
    ]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"content": "a", "refusal": None, "audio": None, "function_call": None}, [Text("a")]),
        ({"content": None}, []),
        ({"content": "a", "tool_calls": [], "annotations": []}, [Text("a")]),
        ({"content": None, "refusal": "No."}, [Refusal("No.")]),
        ({"content": [{"type": "refusal", "refusal": "No."}]}, [Refusal("No.")]),
        ({"content": "a", "reasoning_content": "think"}, [Reasoning("think"), Text("a")]),
        ({"content": "a", "reasoning": "think"}, [Reasoning("think"), Text("a")]),
        ({"content": "a", "reasoning": {"x": 1}}, [Text("a")]),
    ],
)
def test_assistant_turns_as_clients_send_them_back(
    fields: dict[str, Any], expected: list[Any]
) -> None:
    assert messages(USER, {"role": "assistant", **fields})[1].parts == expected


def test_signed_thinking_blocks_stand_in_place_of_the_reasoning_text() -> None:
    blocks = [
        {"type": "redacted_thinking", "data": "UkVE"},
        {"type": "thinking", "thinking": "", "signature": "c2ln"},
    ]
    body = {
        "role": "assistant",
        "content": "a",
        "reasoning_content": "ignored",
        "thinking_blocks": blocks,
    }
    assert messages(USER, body)[1].parts == [
        Reasoning(redacted="UkVE"),
        Reasoning("", "c2ln"),
        Text("a"),
    ]


def test_a_function_round_of_old_clients_becomes_a_tool_round() -> None:
    calling = {
        "role": "assistant",
        "content": None,
        "function_call": {"name": "f", "arguments": "{}"},
    }
    answering = {"role": "function", "name": "f", "content": "x"}
    assert messages(USER, calling, answering)[1:] == [
        Message("assistant", [ToolCall("call_1", "f", "{}")]),
        Message("tool", [ToolResult("call_1", [Text("x")], name="f")]),
    ]


# -- Tools and formats -----------------------------------------------------------------------------------------------


def test_tools_are_read() -> None:
    custom = {"type": "custom", "custom": {"name": "sql", "format": {"type": "text"}}}
    marked = WEATHER | {"cache_control": {"type": "ephemeral"}}
    weather = Tool(
        "get_weather",
        "The weather",
        WEATHER["function"]["parameters"],
        True,  # type: ignore[index]
    )
    assert chat_request(tools=[WEATHER, custom]).tools == [
        weather,
        Tool("sql", kind="custom", extra={"format": {"type": "text"}}),
    ]
    weather.extra = {"cache_control": {"type": "ephemeral"}}
    assert chat_request(tools=[marked]).tools == [weather]


@pytest.mark.parametrize("fields", [{"tools": []}, {"tools": [], "functions": []}, {}])
@pytest.mark.parametrize("choice", ["auto", "none", None])
def test_no_tools_is_no_tools_however_it_is_said(fields: dict[str, Any], choice: object) -> None:
    request = chat_request(**fields, tool_choice=choice)
    assert (request.tools, request.tool_choice) == ([], None)


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("none", ToolChoice("none")),
        ("auto", ToolChoice("auto")),
        ("required", ToolChoice("required")),
        ("any", ToolChoice("required")),
        (
            {"type": "function", "function": {"name": "get_weather"}},
            ToolChoice("named", ["get_weather"]),
        ),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "required",
                    "tools": [{"type": "function", "function": {"name": "get_weather"}}],
                },
            },
            ToolChoice("allowed", ["get_weather"], "required"),
        ),
    ],
)
def test_tool_choices(choice: object, expected: ToolChoice) -> None:
    assert chat_request(tools=[WEATHER], tool_choice=choice).tool_choice == expected


def test_legacy_functions_become_tools() -> None:
    function = {"name": "get_time", "parameters": {"type": "object"}}
    request = chat_request(functions=[function], function_call={"name": "get_time"})
    assert request.tools == [Tool("get_time", parameters={"type": "object"})]
    assert request.tool_choice == ToolChoice("named", ["get_time"])
    assert chat_request(functions=[function], function_call="none").tool_choice == ToolChoice(
        "none"
    )


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"type": "text"}, ResponseFormat("text")),
        ({"type": "json_object"}, ResponseFormat("json_object")),
        (
            {"type": "json_object", "schema": {"type": "object"}},
            ResponseFormat("json_schema", {"type": "object"}, "response"),
        ),
        (
            {"type": "json_schema", "json_schema": {"name": "a", "schema": {}, "strict": True}},
            ResponseFormat("json_schema", {}, "a", strict=True),
        ),
        ({"type": "regex", "pattern": "a+"}, ResponseFormat("regex", pattern="a+")),
    ],
)
def test_response_formats(body: dict[str, Any], expected: ResponseFormat) -> None:
    assert chat_request(response_format=body).response_format == expected


@pytest.mark.parametrize(
    "schema",
    [
        {"type": ["string", "null"]},
        {"items": [{"type": "string"}, True], "additionalProperties": False},
        {"properties": {"type": {"type": "string"}, "any": True}, "enum": [{"type": "x"}]},
        {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"type": "null"}, {"not": {}}]}}},
    ],
    ids=lambda schema: next(iter(schema)),
)
def test_schemas_of_every_form_pass(schema: dict[str, Any]) -> None:
    body = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    read = chat_request(response_format=body).response_format
    assert read == ResponseFormat("json_schema", schema, "a")
