"""POST /v1/chat/completions: body -> Request."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from gateway.endpoints.chat_messages import MessageBody, MessageReader
from gateway.endpoints.chat_tools import (
    FunctionBody,
    NameBody,
    ResponseFormatBody,
    ToolBody,
    ToolChoiceBody,
    read_function_call,
    read_response_format,
    read_tool_choice,
    read_tools,
)
from gateway.endpoints.generation_body import (
    SERVICE_TIERS,
    GenerationBody,
    PositiveCount,
    check_generation,
    sampling_of,
    wants_usage,
)
from gateway.endpoints.json_body import BodyReader, without_bom
from gateway.endpoints.openai_validation import invalid_value, missing
from plugins.events import Request, Sampling


class ChatBody(GenerationBody, kw_only=True):
    messages: list[MessageBody] | None = None
    max_tokens: PositiveCount | None = None
    max_completion_tokens: PositiveCount | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: Annotated[list[ToolBody], Meta(max_length=128)] | None = None
    tool_choice: str | ToolChoiceBody | None = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[list[FunctionBody], Meta(max_length=128)] | None = None
    function_call: str | NameBody | None = None
    response_format: ResponseFormatBody | None = None
    reasoning_effort: str | None = None


_reader = BodyReader(ChatBody, long_list="messages")


def decode_chat(body: bytes, request_id: str, received_s: float) -> Request:
    """Raises InvalidRequest. Fields that we do not know are kept in `extra`, for the provider to judge."""
    body = without_bom(body)
    chat, extra = _reader.read(body)
    model = check_generation(chat)
    if chat.messages is None:
        raise missing("messages")
    tools = read_tools(chat.tools, chat.functions)
    if chat.tool_choice is not None or not chat.function_call:
        tool_choice = read_tool_choice(chat.tool_choice, tools)
    else:
        tool_choice = read_function_call(chat.function_call, tools)
    return Request(
        id=request_id,
        dialect="chat",
        model=model,
        messages=MessageReader().read(chat.messages),
        prompts=[],
        sampling=_sampling(chat),
        stream=bool(chat.stream),
        include_usage=wants_usage(chat),
        tools=tools,
        tool_choice=tool_choice,
        parallel_tool_calls=chat.parallel_tool_calls,
        response_format=read_response_format(chat.response_format),
        reasoning_effort=chat.reasoning_effort,
        user=chat.user,
        metadata=chat.metadata,
        service_tier=chat.service_tier,
        klass=SERVICE_TIERS[chat.service_tier],
        extra=extra,
        body=body,
        received_s=received_s,
    )


def _sampling(chat: ChatBody) -> Sampling:
    sampling = sampling_of(chat, _max_tokens(chat))
    if chat.logprobs:
        sampling.logprobs = True
        sampling.top_logprobs = chat.top_logprobs or 0
    elif chat.top_logprobs:
        raise invalid_value("top_logprobs", "only allowed when 'logprobs' is true.")
    return sampling


def _max_tokens(chat: ChatBody) -> int | None:
    """Two names of one cap; where both stand, the smaller one holds."""
    if chat.max_completion_tokens is None or chat.max_tokens is None:
        return chat.max_tokens or chat.max_completion_tokens
    return min(chat.max_tokens, chat.max_completion_tokens)
