"""Chat messages as clients write them -> `Message`s, and the rules between turns."""

from __future__ import annotations

from typing import Any, cast

import msgspec
from msgspec import Struct

from gateway.endpoints.chat_parts import PartBody, read_parts
from gateway.endpoints.openai_validation import (
    empty_array,
    invalid_value,
    missing,
    unknown_value,
)
from plugins.errors import InvalidRequest
from plugins.events import (
    Json,
    Media,
    Message,
    Part,
    Reasoning,
    Refusal,
    Role,
    Text,
    ToolCall,
    ToolResult,
)

# -- Shapes ----------------------------------------------------------------------------------------------------------


class FunctionCallBody(Struct):
    name: str
    arguments: str | Json | None = None  # some clients send the object instead of its text


class CustomCallBody(Struct):
    name: str
    input: str | None = None


class ToolCallBody(Struct, kw_only=True):
    id: str
    function: FunctionCallBody | None = None
    custom: CustomCallBody | None = None
    extra_content: Any = None  # Gemini's thought signature travels in here


class ThinkingBody(Struct, kw_only=True):
    """A thinking block as we show it to chat clients, for them to send back unchanged."""

    type: str
    thinking: str | None = None
    signature: str | None = None
    data: str | None = None


class MessageBody(Struct, kw_only=True):
    role: str
    content: str | list[PartBody] | None = None
    name: str | None = None
    tool_calls: list[ToolCallBody] | None = None
    tool_call_id: str | None = None
    function_call: FunctionCallBody | None = None  # the form before tools
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: Any = None  # the same by another name where it is text; other forms are ignored
    thinking_blocks: list[ThinkingBody] | None = None
    cache_control: Json | None = None


# -- Messages --------------------------------------------------------------------------------------------------------

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_INSTRUCTING_ROLES: dict[str, Role] = {
    "user": "user",
    "system": "system",
    "developer": "developer",
}


class MessageReader:
    """Reads one conversation. Keeps which tool calls of the last assistant turn still wait for their result."""

    def __init__(self) -> None:
        self._calls: set[str] = set()
        self._unanswered: list[str] = []
        self._function_call_id = ""

    def read(self, bodies: list[MessageBody]) -> list[Message]:
        """Raises InvalidRequest naming the message by its index."""
        if not bodies:
            raise empty_array("messages")
        messages = [self._read(body, i) for i, body in enumerate(bodies)]
        self._check_answered(len(bodies) - 1)
        return messages

    def _read(self, body: MessageBody, i: int) -> Message:
        role = _INSTRUCTING_ROLES.get(body.role)
        if role is not None:
            if self._calls:
                self._end_turn(i)
            content = body.content
            if isinstance(content, str):  # the common message
                return Message(role, [Text(content, body.cache_control)], body.name)
            return Message(role, _required_parts(body, i), body.name)
        if body.role == "assistant":
            self._end_turn(i)
            return self._read_assistant(body, i)
        if body.role == "tool":
            return self._read_tool(body, i)
        if body.role == "function":
            return self._read_function(body, i)
        raise unknown_value(f"messages[{i}].role", body.role, _ROLES)

    def _read_assistant(self, body: MessageBody, i: int) -> Message:
        parts: list[Part] = [*_reasoning(body, i), *_content(body, i)]
        if body.refusal:
            parts.append(Refusal(body.refusal))
        if body.tool_calls:
            calls = [_read_call(call, i, j) for j, call in enumerate(body.tool_calls)]
            self._unanswered = [call.id for call in calls]
            parts += calls
        elif body.function_call is not None:
            self._function_call_id = f"call_{i}"
            parts.append(_function_call(self._function_call_id, body.function_call))
        self._calls = set(self._unanswered)
        return Message("assistant", parts, body.name)

    def _read_tool(self, body: MessageBody, i: int) -> Message:
        call_id = body.tool_call_id
        if call_id is None:
            raise missing(f"messages[{i}].tool_call_id")
        if not self._calls:
            raise InvalidRequest(
                "Invalid parameter: messages with role 'tool' must be a response to a preceding "
                "message with 'tool_calls'.",
                param=f"messages[{i}].role",
            )
        if call_id not in self._calls:
            raise InvalidRequest(
                f"Invalid parameter: 'tool_call_id' of '{call_id[:80]}' not found in 'tool_calls' "
                "of the previous message.",
                param=f"messages[{i}].tool_call_id",
            )
        if call_id in self._unanswered:
            self._unanswered.remove(call_id)
        return _tool_message(body, i, call_id)

    def _read_function(self, body: MessageBody, i: int) -> Message:
        """A result of the form before tools: it answers the last `function_call`."""
        self._end_turn(i)
        if body.name is None:
            raise missing(f"messages[{i}].name")
        if not self._function_call_id:
            raise InvalidRequest(
                "Invalid parameter: messages with role 'function' must be a response to a "
                "preceding message with 'function_call'.",
                param=f"messages[{i}].role",
            )
        return _tool_message(body, i, self._function_call_id)

    def _end_turn(self, i: int) -> None:
        self._check_answered(i)
        self._calls = set()

    def _check_answered(self, i: int) -> None:
        if self._unanswered:
            raise InvalidRequest(
                "An assistant message with 'tool_calls' must be followed by tool messages "
                "responding to each 'tool_call_id'. The following tool_call_ids did not have "
                f"response messages: {', '.join(self._unanswered)[:400]}",
                param=f"messages[{i}].role",
            )


def _content(body: MessageBody, i: int) -> list[Part]:
    content = body.content
    if content is None:
        return []
    if isinstance(content, str):
        return [Text(content, body.cache_control)]
    parts = read_parts(content, f"messages[{i}]")
    if body.cache_control is not None and parts and isinstance(parts[-1], Text | Media):
        parts[-1].cache_control = body.cache_control
    return parts


def _required_parts(body: MessageBody, i: int) -> list[Part]:
    if body.content is None:
        raise missing(f"messages[{i}].content")
    if not body.content:
        raise empty_array(f"messages[{i}].content")
    return _content(body, i)


def _reasoning(body: MessageBody, i: int) -> list[Part]:
    """Signed blocks where the client kept them; else the text alone, under either of its names."""
    if body.thinking_blocks:
        return [_thinking(block, i, j) for j, block in enumerate(body.thinking_blocks)]
    text = body.reasoning_content or body.reasoning
    return [Reasoning(text)] if text and isinstance(text, str) else []


def _thinking(block: ThinkingBody, i: int, j: int) -> Reasoning:
    if block.type == "redacted_thinking":
        return Reasoning(redacted=block.data or "")
    if block.type == "thinking":
        return Reasoning(block.thinking or "", block.signature)
    where = f"messages[{i}].thinking_blocks[{j}].type"
    raise unknown_value(where, block.type, ("thinking", "redacted_thinking"))


def _tool_message(body: MessageBody, i: int, call_id: str) -> Message:
    if body.content is None:
        raise missing(f"messages[{i}].content")
    parts: list[Text | Media] = []
    for j, part in enumerate(_content(body, i)):
        if not isinstance(part, Text | Media):
            raise invalid_value(f"messages[{i}].content[{j}]", "not allowed in a tool message.")
        parts.append(part)
    return Message("tool", [ToolResult(call_id, parts, name=body.name)])


def _read_call(body: ToolCallBody, i: int, j: int) -> ToolCall:
    if body.function is not None:
        call = _function_call(body.id, body.function)
        call.signature = _thought_signature(body.extra_content)
        return call
    if body.custom is not None:
        return ToolCall(body.id, body.custom.name, body.custom.input or "", kind="custom")
    raise missing(f"messages[{i}].tool_calls[{j}].function")


def _function_call(call_id: str, body: FunctionCallBody) -> ToolCall:
    arguments = body.arguments
    if isinstance(arguments, dict):
        arguments = msgspec.json.encode(arguments).decode()
    return ToolCall(call_id, body.name, arguments or "")


def _thought_signature(extra: Any) -> str | None:
    for key in ("google", "thought_signature"):
        extra = cast(Json, extra).get(key) if isinstance(extra, dict) else None
    return extra if isinstance(extra, str) else None
