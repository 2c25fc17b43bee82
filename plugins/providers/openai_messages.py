"""Messages of our vocabulary -> chat messages of the OpenAI form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from plugins.errors import Unsupported
from plugins.events import (
    Json,
    Media,
    Message,
    Part,
    Reasoning,
    Refusal,
    Text,
    ToolCall,
    ToolResult,
)


def encode_messages(messages: list[Message], keep_cache_control: bool) -> list[Json]:
    """`keep_cache_control`: the client wrote it in this dialect, so the upstream may see it."""
    encoded: list[Json] = []
    for message in messages:
        encoded += _encode(message, keep_cache_control)
    return encoded


def _encode(message: Message, keep_cache_control: bool) -> list[Json]:
    """Tool results are messages of their own and must follow the calls at once, so they come first."""
    encoded: list[Json] = []
    rest: list[Part] = []
    for part in message.parts:
        if isinstance(part, ToolResult):
            texts = [item for item in part.parts if isinstance(item, Text)]
            content = _content(texts, keep_cache_control)
            encoded.append(
                {"role": "tool", "tool_call_id": part.tool_call_id, "content": content or ""}
            )
            rest += [
                item for item in part.parts if isinstance(item, Media)
            ]  # only users may show images
        else:
            rest.append(part)
    role = "user" if message.role == "tool" else message.role
    if rest or not encoded:
        encoded.append(_encode_turn(role, rest, message.name, keep_cache_control))
    return encoded


def _encode_turn(role: str, parts: list[Part], name: str | None, keep_cache_control: bool) -> Json:
    shown = [part for part in parts if isinstance(part, Text | Media)]
    turn: Json = {"role": role, "content": _content(shown, keep_cache_control)}
    if name:
        turn["name"] = name
    if role != "assistant":
        turn["content"] = turn["content"] or ""
        return turn
    if reasoning := "".join(part.text for part in parts if isinstance(part, Reasoning)):
        turn["reasoning_content"] = reasoning
    if refusal := "".join(part.text for part in parts if isinstance(part, Refusal)):
        turn["refusal"] = refusal
    if calls := [_encode_call(part) for part in parts if isinstance(part, ToolCall)]:
        turn["tool_calls"] = calls
    elif turn["content"] is None:
        turn["content"] = ""  # null stands only beside calls
    return turn


def _content(parts: Sequence[Text | Media], keep_cache_control: bool) -> str | list[Json] | None:
    """One plain text as a string: every server reads that; else a list of parts."""
    if not parts:
        return None
    first = parts[0]
    marked = keep_cache_control and any(part.cache_control for part in parts)
    if len(parts) == 1 and isinstance(first, Text) and not marked:
        return first.text
    return [_encode_part(part, keep_cache_control) for part in parts]


def _encode_part(part: Text | Media, keep_cache_control: bool) -> Json:
    encoded: Json = (
        {"type": "text", "text": part.text} if isinstance(part, Text) else _encode_media(part)
    )
    if keep_cache_control and part.cache_control:
        encoded["cache_control"] = part.cache_control
    return encoded


def _encode_media(part: Media) -> Json:
    if part.kind == "image":
        if not (part.url or part.data_base64):
            raise Unsupported("This model cannot take an image by file id.", param="messages")
        image: Json = {"url": part.url or _data_url(part, "image/png")}
        if part.detail:
            image["detail"] = part.detail
        return {"type": "image_url", "image_url": image}
    if part.kind == "audio":
        if not part.data_base64:
            raise Unsupported("This model takes audio only as base64 data.", param="messages")
        audio_format = (part.media_type or "audio/wav").partition("/")[2]
        return {
            "type": "input_audio",
            "input_audio": {"data": part.data_base64, "format": audio_format},
        }
    if part.url:
        raise Unsupported("This model cannot take a document by URL.", param="messages")
    file: dict[str, Any] = {
        "file_id": part.file_id,
        "file_data": _data_url(part, "application/pdf") if part.data_base64 else None,
        "filename": part.filename,
    }
    return {"type": "file", "file": {name: value for name, value in file.items() if value}}


def _data_url(part: Media, default_type: str) -> str:
    return f"data:{part.media_type or default_type};base64,{part.data_base64}"


def _encode_call(call: ToolCall) -> Json:
    if call.kind == "custom":
        payload: Json = {"name": call.name, "input": call.arguments}
    else:
        payload = {"name": call.name, "arguments": call.arguments or "{}"}
    encoded: Json = {"id": call.id, "type": call.kind, call.kind: payload}
    if call.signature:  # Gemini's OpenAI endpoint wants it back
        encoded["extra_content"] = {"google": {"thought_signature": call.signature}}
    return encoded
