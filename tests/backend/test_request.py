from __future__ import annotations

from typing import Any

import pytest

from backend.engine.params import EmbeddingParams, Objective, RequestClass, SamplingParams
from backend.request import template_messages, to_generate
from plugins.errors import InvalidRequest, Unsupported
from plugins.events import (
    EmbeddingForm,
    Media,
    Message,
    Reasoning,
    Request,
    ResponseFormat,
    Sampling,
    Text,
    Tool,
    ToolCall,
    ToolChoice,
    ToolResult,
)


def chat(*messages: Message, **fields: Any) -> Request:
    return Request(
        "req_1", "chat", "m", messages=list(messages) or [Message("user", [Text("hi")])], **fields
    )


def test_inputs_to_embed_go_as_they_are_with_their_tenant_and_class() -> None:
    request = Request("r", "embeddings", "m", prompts=["a", [1]], klass="batch")
    request.embedding = EmbeddingForm(dimensions=8)
    generate = to_generate(request, "web")
    assert (generate.prompts, generate.embedding) == (["a", [1]], EmbeddingParams(8))
    assert (generate.klass, generate.cache_salt) == (RequestClass.BATCH, b"web\0")


@pytest.mark.parametrize(
    ("num_inputs", "klass", "expected"),
    [
        (16, "standard", RequestClass.STANDARD),
        (17, "standard", RequestClass.FLEX),
        (17, "interactive", RequestClass.FLEX),
        (17, "batch", RequestClass.BATCH),
    ],
)
def test_a_bulk_of_inputs_lets_others_go_first(
    num_inputs: int, klass: Any, expected: RequestClass
) -> None:
    request = Request("r", "embeddings", "m", prompts=["a"] * num_inputs, klass=klass)
    assert to_generate(request).klass is expected


def test_text_parts_become_one_text() -> None:
    messages = [Message("user", [Text("one"), Text("two")])]
    assert template_messages(messages) == [{"role": "user", "content": "one\ntwo"}]


def test_a_name_goes_with_its_message() -> None:
    assert template_messages([Message("user", [Text("x")], name="ann")])[0]["name"] == "ann"


def test_tool_calls_keep_their_arguments_as_text() -> None:
    call = ToolCall("call_1", "look", '{"at": 1}')
    assert template_messages([Message("assistant", [call])]) == [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "look", "arguments": '{"at": 1}'},
                }
            ],
        }
    ]


def test_each_tool_result_is_a_message_of_its_own_before_the_users_text() -> None:
    results = [ToolResult("a", [Text("1")], name="look"), ToolResult("b", [Text("2")])]
    assert template_messages([Message("user", [*results, Text("and now?")])]) == [
        {"role": "tool", "tool_call_id": "a", "content": "1", "name": "look"},
        {"role": "tool", "tool_call_id": "b", "content": "2"},
        {"role": "user", "content": "and now?"},
    ]


def test_a_message_without_parts_is_empty_text() -> None:
    assert template_messages([Message("user", [])]) == [{"role": "user", "content": ""}]


def test_earlier_reasoning_is_told_apart_from_the_answer() -> None:
    (message,) = template_messages([Message("assistant", [Reasoning("hm"), Text("yes")])])
    assert (message["content"], message["reasoning_content"]) == ("yes", "hm")


@pytest.mark.parametrize("nested", [False, True], ids=["of a user", "of a tool"])
def test_media_is_refused_with_its_place(nested: bool) -> None:
    image = Media("image", url="http://x/y.png")
    parts: Any = [ToolResult("a", [image])] if nested else [image]
    with pytest.raises(InvalidRequest, match="reads text only") as refused:
        to_generate(chat(Message("user", [Text("x")]), Message("user", parts)))
    assert refused.value.param == "messages[1].content"


def test_sampling_that_is_not_given_is_left_to_the_engine() -> None:
    assert to_generate(chat()).params == SamplingParams()


def test_sampling_reaches_the_engine() -> None:
    sampling = Sampling(
        max_tokens=5,
        min_tokens=1,
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        n=3,
        seed=7,
        stop=["x"],
        stop_token_ids=[2],
        ignore_eos=True,
        presence_penalty=0.1,
        frequency_penalty=0.2,
        repetition_penalty=1.1,
        logit_bias={5: 1.0},
        logprobs=True,
        top_logprobs=4,
    )
    generate = to_generate(chat(sampling=sampling))
    assert generate.n == 3
    assert generate.params == SamplingParams(
        max_tokens=5,
        min_tokens=1,
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        seed=7,
        presence_penalty=0.1,
        frequency_penalty=0.2,
        repetition_penalty=1.1,
        logit_bias={5: 1.0},
        stop=("x",),
        stop_token_ids=(2,),
        ignore_eos=True,
        logprobs=4,
    )


def test_top_logprobs_without_logprobs_ask_for_nothing() -> None:
    assert to_generate(chat(sampling=Sampling(top_logprobs=4))).params.logprobs is None


def test_the_class_and_the_cache_salt_reach_the_engine() -> None:
    generate = to_generate(chat(klass="batch", extra={"cache_salt": "mine"}))
    assert (generate.klass, generate.cache_salt) == (RequestClass.BATCH, b"\0mine")


def test_the_objective_reaches_the_engine() -> None:
    objective = Objective(400.0, 50.0)
    assert to_generate(chat(), "", objective).objective == objective


def test_tenants_never_share_a_cache_salt() -> None:
    salts = {to_generate(chat(), tenant).cache_salt for tenant in ("a", "b")}
    assert len(salts) == 2


def test_tools_go_to_the_template() -> None:
    tools = [Tool("look", "Looks.", {"type": "object"})]
    function = {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}
    assert to_generate(chat(tools=tools)).tools == [{"type": "function", "function": function}]


def test_tool_choice_none_hides_the_tools() -> None:
    request = chat(tools=[Tool("look")], tool_choice=ToolChoice("none"))
    assert to_generate(request).tools is None


def test_a_trailing_assistant_message_is_continued() -> None:
    prefill = chat(Message("user", [Text("x")]), Message("assistant", [Text("So")]))
    assert to_generate(prefill).continue_final_message
    assert not to_generate(chat()).continue_final_message


def test_template_arguments_pass_through() -> None:
    extra = {"chat_template_kwargs": {"enable_thinking": False}}
    generate = to_generate(chat(extra=extra, reasoning_effort="low"))
    assert generate.template_kwargs == {"reasoning_effort": "low", "enable_thinking": False}


def test_prompts_of_a_completion_pass_through() -> None:
    request = Request("r", "completions", "m", prompts=["a", [1]], sampling=Sampling(echo=True))
    generate = to_generate(request)
    assert (generate.prompts, generate.messages, generate.echo) == (["a", [1]], None, True)


def completions(**sampling: Any) -> Request:
    return Request("r", "completions", "m", prompts=["a"], sampling=Sampling(**sampling))


def test_echo_with_logprobs_asks_for_those_of_the_prompt() -> None:
    generate = to_generate(completions(echo=True, logprobs=True, top_logprobs=3))
    assert (generate.params.prompt_logprobs, generate.params.logprobs) == (3, 3)
    assert to_generate(completions(logprobs=True)).params.prompt_logprobs is None
    assert to_generate(completions(echo=True)).params.prompt_logprobs is None


def test_no_output_at_all_is_for_echo_only() -> None:
    assert to_generate(completions(echo=True, max_tokens=0)).params.prompt_logprobs == 0
    with pytest.raises(InvalidRequest, match="only with echo may it be 0") as refused:
        to_generate(completions(max_tokens=0))
    assert refused.value.param == "max_tokens"


def test_best_of_is_the_number_of_candidates() -> None:
    assert to_generate(completions(best_of=3, n=2)).rows_per_prompt == 3
    assert to_generate(completions(n=2)).rows_per_prompt == 2


@pytest.mark.parametrize("best_of", [1, 129])
def test_best_of_has_its_limits(best_of: int) -> None:
    with pytest.raises(InvalidRequest, match="between n, which is 2, and 128") as refused:
        to_generate(completions(n=2, best_of=best_of))
    assert refused.value.param == "best_of"


def test_best_of_cannot_stream() -> None:
    request = completions(n=1, best_of=2)
    request.stream = True
    with pytest.raises(InvalidRequest, match="cannot stream"):
        to_generate(request)


def test_fields_that_change_nothing_are_let_through() -> None:
    to_generate(chat(extra={"store": True, "foo": 1, "suffix": None, "functions": []}))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"sampling": Sampling(prompt_logprobs=True)}, "prompt_logprobs"),
        ({"tools": [Tool("x", kind="custom")]}, "tools[0].type"),
        ({"extra": {"suffix": "end"}}, "suffix"),
    ],
    ids=str,
)
def test_what_is_not_built_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(Unsupported) as refused:
        to_generate(chat(**fields))
    assert (refused.value.status, refused.value.param) == (400, param)


LOOK, GO = Tool("look"), Tool("go")


@pytest.mark.parametrize(
    ("choice", "shown", "must_call"),
    [
        (None, ["look", "go"], []),
        (ToolChoice("auto"), ["look", "go"], []),
        (ToolChoice("none"), [], []),
        (ToolChoice("required"), ["look", "go"], ["look", "go"]),
        (ToolChoice("named", ["go"]), ["look", "go"], ["go"]),
        (ToolChoice("allowed", ["go"]), ["go"], []),
        (ToolChoice("allowed", ["go"], "required"), ["go"], ["go"]),
    ],
    ids=str,
)
def test_a_tool_choice_says_what_is_shown_and_what_must_be_called(
    choice: ToolChoice | None, shown: list[str], must_call: list[str]
) -> None:
    generate = to_generate(chat(tools=[LOOK, GO], tool_choice=choice))
    assert [tool["function"]["name"] for tool in generate.tools or []] == shown
    assert generate.must_call == must_call


def test_several_calls_are_made_unless_they_are_refused_or_one_is_named() -> None:
    assert to_generate(chat(tools=[LOOK], tool_choice=ToolChoice("required"))).parallel_calls
    named = ToolChoice("named", ["look"])
    assert not to_generate(chat(tools=[LOOK], tool_choice=named)).parallel_calls
    assert not to_generate(chat(tools=[LOOK], parallel_tool_calls=False)).parallel_calls


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": ResponseFormat("text")},
        {"tool_choice": ToolChoice("auto")},
        {"tool_choice": ToolChoice("allowed", ["a"], "auto")},
        {"sampling": Sampling(n=2, best_of=2)},
        {"sampling": Sampling(echo=False, logprobs=True)},
    ],
    ids=str,
)
def test_what_asks_for_nothing_special_is_taken(fields: dict[str, Any]) -> None:
    to_generate(chat(**fields))


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"cache_salt": 5}, "cache_salt"),
    ],
    ids=str,
)
def test_extra_fields_of_the_wrong_form_are_refused(extra: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        to_generate(chat(extra=extra))
    assert refused.value.param == param


def test_a_chat_without_messages_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="at least one message"):
        to_generate(Request("r", "chat", "m"))


@pytest.mark.parametrize("n", [0, -1, 129])
def test_a_number_of_choices_out_of_range_is_refused(n: int) -> None:
    with pytest.raises(InvalidRequest, match="n must be between 1 and 128") as refused:
        to_generate(chat(sampling=Sampling(n=n)))
    assert refused.value.param == "n"
