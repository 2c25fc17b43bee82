"""Requests to OpenAI-shaped upstreams: the client's own body made fit, or every field of our vocabulary encoded."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from plugins.errors import Unsupported
from plugins.events import (
    Media,
    Message,
    Reasoning,
    Refusal,
    Request,
    ResponseFormat,
    Sampling,
    Text,
    Tool,
    ToolCall,
    ToolChoice,
    ToolResult,
)
from plugins.providers.openai_body import rewrite_body
from plugins.providers.openai_request import encode_request

CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def rewrite(body: bytes | dict[str, Any], stream: bool = False) -> Any:
    raw = body if isinstance(body, bytes) else msgspec.json.encode(body)
    request = Request("req_1", "chat", "m", stream=stream, body=raw)
    return msgspec.json.decode(rewrite_body(request, "up-model"))


def encode(dialect: Any = "chat", **fields: Any) -> Any:
    return msgspec.json.decode(encode_request(Request("req_1", dialect, "m", **fields), "up"))


def encode_message(*parts: Any, role: Any = "user", dialect: Any = "chat") -> Any:
    return encode(dialect, messages=[Message(role, [*parts])])["messages"]


# -- The client's own body -------------------------------------------------------------------------


def test_only_the_model_changes() -> None:
    raw = b'{"model":"m","messages":[{"role":"user", "content":"a\\u00e9\xc3\xa9"}],"x":1.50}'
    request = Request("req_1", "chat", "m", body=raw)
    assert rewrite_body(request, "up") == raw.replace(b'"m"', b'"up"')


def test_nulls_are_absent_and_zeros_are_values() -> None:
    body = {"model": "m", "a": None, "temperature": 0, "logprobs": False, "user": "", "stop": []}
    expected = {"model": "up-model", "temperature": 0, "logprobs": False, "user": "", "stop": []}
    assert rewrite(body) == expected


def test_the_last_of_two_equal_keys_counts() -> None:
    assert rewrite(b'{"model":"a","seed":1,"model":"b","seed":2}') == {
        "model": "up-model",
        "seed": 2,
    }


@pytest.mark.parametrize("tools", [[], None, "absent"])
def test_no_tools_means_no_choice_among_them(tools: Any) -> None:
    body = {
        "model": "m",
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "function_call": "auto",
    }
    if tools != "absent":
        body |= {"tools": tools, "functions": tools}
    assert rewrite(body) == {"model": "up-model"}


def test_an_empty_list_of_tools_is_seen_through_blanks() -> None:
    assert rewrite(b'{"model":"m","tools":[ \n ]}') == {"model": "up-model"}


def test_tools_keep_their_choice() -> None:
    body = {"model": "m", "tools": [{"type": "x"}], "tool_choice": "auto"}
    assert rewrite(body) == {**body, "model": "up-model"}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("absent", {"include_usage": True}),
        (None, {"include_usage": True}),
        ({"include_usage": False}, {"include_usage": True}),
        ({"include_obfuscation": False}, {"include_obfuscation": False, "include_usage": True}),
    ],
)
def test_a_stream_always_asks_for_usage(options: Any, expected: Any) -> None:
    body: dict[str, Any] = {"model": "m"}
    if options != "absent":
        body["stream_options"] = options
    assert rewrite(body, stream=True) == {
        "model": "up-model",
        "stream": True,
        "stream_options": expected,
    }


def test_without_a_stream_there_are_no_stream_options() -> None:
    body = {"model": "m", "stream": False, "stream_options": {"include_usage": True}}
    assert rewrite(body) == {"model": "up-model", "stream": False}


# -- Encoded from our vocabulary -------------------------------------------------------------------


def test_an_empty_request_sends_no_defaults() -> None:
    assert encode() == {"model": "up", "messages": []}


def test_a_stream_is_asked_for_with_its_usage() -> None:
    encoded = encode(stream=True)
    assert encoded["stream"] is True
    assert encoded["stream_options"] == {"include_usage": True}


def test_every_sampling_field_is_sent() -> None:
    given: dict[str, Any] = {
        "max_tokens": 0,
        "min_tokens": 1,
        "temperature": 0.0,
        "top_p": 0.5,
        "top_k": 3,
        "min_p": 0.1,
        "n": 2,
        "seed": 0,
        "stop": ["a"],
        "stop_token_ids": [1],
        "ignore_eos": True,
        "presence_penalty": 0.0,
        "frequency_penalty": 1.0,
        "repetition_penalty": 1.1,
    }
    encoded = encode(sampling=Sampling(**given, logit_bias={5: -100.0}, logprobs=True))
    expected = {"logit_bias": {"5": -100.0}, "logprobs": True, "top_logprobs": 0}
    assert encoded == {"model": "up", "messages": [], **given, **expected}


def test_completions_have_their_own_fields() -> None:
    sampling = Sampling(logprobs=True, top_logprobs=1, echo=True, best_of=3)
    encoded = encode("completions", prompts=["a", "b"], sampling=sampling, extra={"suffix": "z"})
    assert encoded == {
        "model": "up",
        "prompt": ["a", "b"],
        "suffix": "z",
        "logprobs": 1,
        "echo": True,
        "best_of": 3,
    }


@pytest.mark.parametrize("prompt", ["a", [1, 2]])
def test_a_single_prompt_is_no_list(prompt: Any) -> None:
    assert encode("completions", prompts=[prompt])["prompt"] == prompt
    assert encode("embeddings", prompts=[prompt])["input"] == prompt


def test_about_the_caller() -> None:
    fields = {"user": "u", "metadata": {"a": "b"}, "service_tier": "flex"}
    assert encode(**fields) == {"model": "up", "messages": [], **fields}


def test_fields_without_a_word_of_ours_go_to_their_own_dialect_only() -> None:
    extra = {"chat_template_kwargs": {"x": 1}, "model": "evil"}
    assert encode(extra=extra) == {
        "model": "up",
        "messages": [],
        "chat_template_kwargs": {"x": 1},
    }
    assert encode("messages", extra=extra) == {"model": "up", "messages": []}


# -- Messages --------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["system", "developer", "user"])
def test_one_text_is_a_string(role: str) -> None:
    assert encode_message(Text("hi"), role=role) == [{"role": role, "content": "hi"}]


def test_a_name_is_kept() -> None:
    encoded = encode(messages=[Message("user", [Text("hi")], name="ann")])
    assert encoded["messages"] == [{"role": "user", "content": "hi", "name": "ann"}]


@pytest.mark.parametrize(
    ("media", "part"),
    [
        (
            Media("image", url="https://a/b.png", detail="low"),
            {"type": "image_url", "image_url": {"url": "https://a/b.png", "detail": "low"}},
        ),
        (
            Media("image", data_base64="QUI=", media_type="image/gif"),
            {"type": "image_url", "image_url": {"url": "data:image/gif;base64,QUI="}},
        ),
        (
            Media("audio", data_base64="QUI=", media_type="audio/mp3"),
            {"type": "input_audio", "input_audio": {"data": "QUI=", "format": "mp3"}},
        ),
        (Media("file", file_id="file-1"), {"type": "file", "file": {"file_id": "file-1"}}),
        (
            Media("file", data_base64="QUI=", filename="a.pdf"),
            {
                "type": "file",
                "file": {"file_data": "data:application/pdf;base64,QUI=", "filename": "a.pdf"},
            },
        ),
    ],
    ids=["url", "base64", "audio", "file-id", "file-data"],
)
def test_media_become_parts(media: Media, part: Any) -> None:
    (message,) = encode_message(Text("see"), media)
    assert message["content"] == [{"type": "text", "text": "see"}, part]


@pytest.mark.parametrize(
    "media",
    [Media("image", file_id="f"), Media("audio", url="https://a"), Media("file", url="https://a")],
)
def test_media_that_this_api_has_no_form_for_are_refused(media: Media) -> None:
    with pytest.raises(Unsupported, match=r"cannot take|takes audio only"):
        encode_message(media)


def test_cache_breakpoints_stay_within_the_dialect() -> None:
    part = Text("long", cache_control={"type": "ephemeral"})
    (kept,) = encode_message(part)
    assert kept["content"] == [
        {"type": "text", "text": "long", "cache_control": {"type": "ephemeral"}}
    ]
    (dropped,) = encode_message(part, dialect="messages")
    assert dropped["content"] == "long"


def test_an_assistant_turn_carries_calls_reasoning_and_refusal() -> None:
    parts = [Reasoning("hm", "sig"), ToolCall("call_1", "f", ""), Refusal("no")]
    assert encode_message(*parts, role="assistant") == [
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "hm",
            "refusal": "no",
            "tool_calls": [CALL],
        }
    ]


def test_an_empty_assistant_turn_is_an_empty_text() -> None:
    assert encode_message(role="assistant") == [{"role": "assistant", "content": ""}]


def test_custom_calls_and_thought_signatures_are_sent_back() -> None:
    custom = ToolCall("c", "f", "raw", kind="custom")
    signed = ToolCall("d", "g", "{}", signature="s")
    (message,) = encode_message(custom, signed, role="assistant")
    assert message["tool_calls"] == [
        {"id": "c", "type": "custom", "custom": {"name": "f", "input": "raw"}},
        {
            "id": "d",
            "type": "function",
            "function": {"name": "g", "arguments": "{}"},
            "extra_content": {"google": {"thought_signature": "s"}},
        },
    ]


def test_results_stand_in_messages_of_their_own_before_other_text() -> None:
    parts = [Text("and now?"), ToolResult("a", [Text("1")]), ToolResult("b", [Text("2")])]
    assert encode_message(*parts, dialect="messages") == [
        {"role": "tool", "tool_call_id": "a", "content": "1"},
        {"role": "tool", "tool_call_id": "b", "content": "2"},
        {"role": "user", "content": "and now?"},
    ]


def test_images_of_a_result_are_shown_by_the_user() -> None:
    result = ToolResult("a", [Media("image", url="https://a/b.png")])
    assert encode_message(result, role="tool") == [
        {"role": "tool", "tool_call_id": "a", "content": ""},
        {
            "role": "user",
            "content": [{"type": "image_url", "image_url": {"url": "https://a/b.png"}}],
        },
    ]


# -- Tools and formats -----------------------------------------------------------------------------

TOOLS = [
    Tool("f", "does f", {"type": "object"}, strict=True),
    Tool("g"),
    Tool("c", kind="custom", extra={"format": {"type": "text"}}),
]


def test_tools_are_sent_with_all_they_have() -> None:
    assert encode(tools=TOOLS, parallel_tool_calls=False) == {
        "model": "up",
        "messages": [],
        "parallel_tool_calls": False,
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": "f",
                    "description": "does f",
                    "parameters": {"type": "object"},
                    "strict": True,
                },
            },
            {"type": "function", "function": {"name": "g"}},
            {"type": "custom", "custom": {"name": "c", "format": {"type": "text"}}},
        ],
    }


@pytest.mark.parametrize(
    ("choice", "encoded"),
    [
        (ToolChoice("none"), "none"),
        (ToolChoice("auto"), "auto"),
        (ToolChoice("required"), "required"),
        (ToolChoice("named", ["f"]), {"type": "function", "function": {"name": "f"}}),
        (ToolChoice("named", ["c"]), {"type": "custom", "custom": {"name": "c"}}),
        (
            ToolChoice("allowed", ["f", "g"], "required"),
            {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "required",
                    "tools": [
                        {"type": "function", "function": {"name": "f"}},
                        {"type": "function", "function": {"name": "g"}},
                    ],
                },
            },
        ),
    ],
)
def test_a_choice_among_tools_is_sent(choice: ToolChoice, encoded: Any) -> None:
    assert encode(tools=TOOLS, tool_choice=choice)["tool_choice"] == encoded


def test_a_choice_without_tools_is_not_sent() -> None:
    assert "tool_choice" not in encode(tool_choice=ToolChoice("auto"))


@pytest.mark.parametrize(
    ("wanted", "fields"),
    [
        (ResponseFormat("text"), {"response_format": {"type": "text"}}),
        (ResponseFormat("json_object"), {"response_format": {"type": "json_object"}}),
        (
            ResponseFormat("json_schema", {"type": "object"}, "n", strict=True),
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": True},
                }
            },
        ),
        (ResponseFormat("regex", pattern="a+"), {"structured_outputs": {"regex": "a+"}}),
    ],
)
def test_a_response_format_is_sent(wanted: ResponseFormat, fields: Any) -> None:
    assert encode(response_format=wanted) == {"model": "up", "messages": [], **fields}


def test_reasoning_effort_is_sent() -> None:
    assert encode(reasoning_effort="low")["reasoning_effort"] == "low"
