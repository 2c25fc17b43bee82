"""Chat answers as a stream of `chat.completion.chunk` events."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable
from typing import Any

from msgspec import UNSET

from gateway.endpoints.chat_answer import (
    ChunkChoice,
    Delta,
    FunctionAnswer,
    LogprobsAnswer,
    ToolCallAnswer,
    closes_block,
    logprob_answers,
    signature_content,
    thinking_answer,
)
from gateway.endpoints.chat_tools import asked_in_functions
from gateway.endpoints.openai_stream import OpenAIStreamEncoder
from plugins.events import (
    Event,
    Finished,
    ReasoningDelta,
    RefusalDelta,
    Request,
    TextDelta,
    ToolCallDelta,
    Verbatim,
)

_ALPHANUMERICS = string.ascii_letters + string.digits


def new_call_id() -> str:
    return "call_" + "".join(secrets.choice(_ALPHANUMERICS) for _ in range(24))


class ChatStreamEncoder(OpenAIStreamEncoder):
    object_name = "chat.completion.chunk"
    id_prefix = "chatcmpl-"

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        self._text = ChunkChoice(
            0, Delta(content="")
        )  # reused: most chunks differ only in the text
        self._wants_function_call = asked_in_functions(request)
        self._begun_calls: set[tuple[int, int]] = set()
        self._had_verbatim = False
        self._thinking: dict[int, list[str]] = {}  # text of the open thinking block, by choice

    def _content_writers(self) -> dict[type[Any], Callable[[Any, bytearray], None]]:
        return {
            TextDelta: self._on_text,
            ReasoningDelta: self._on_reasoning,
            RefusalDelta: self._on_refusal,
            ToolCallDelta: self._on_tool_call,
        }

    def _write_first(self, choice: int, buffer: bytearray, event: Event) -> None:
        """Content is null in front of a tool call, so that joined deltas equal the whole message."""
        content = None if isinstance(event, ToolCallDelta) else ""
        self._write_delta(choice, Delta("assistant", content, None), buffer)

    def _write_finish(self, event: Finished, buffer: bytearray) -> None:
        reason: str = event.reason
        if reason == "tool_calls" and self._wants_function_call:
            reason = "function_call"
        self._write_choice(ChunkChoice(event.choice, Delta(), finish_reason=reason), buffer)

    def _write_delta(self, choice: int, delta: Delta, buffer: bytearray) -> None:
        self._write_choice(ChunkChoice(choice, delta), buffer)

    def _on_text(self, event: TextDelta, buffer: bytearray) -> None:
        if not self._may_write(event, buffer):
            return
        text = self._text
        text.index = event.choice
        text.delta.content = event.text
        text.logprobs = None
        if event.logprobs and self._request.sampling.logprobs:
            text.logprobs = LogprobsAnswer(logprob_answers(event.logprobs))
        elif not event.text:
            return
        self._write_choice(text, buffer)

    def _on_reasoning(self, event: ReasoningDelta, buffer: bytearray) -> None:
        if not self._may_write(event, buffer):
            return
        delta = Delta(reasoning_content=event.text or UNSET)
        pieces = self._thinking.setdefault(event.choice, [])
        pieces.append(event.text)
        if closes_block(event):
            delta.thinking_blocks = [thinking_answer("".join(pieces), event)]
            pieces.clear()
        self._write_delta(event.choice, delta, buffer)

    def _on_refusal(self, event: RefusalDelta, buffer: bytearray) -> None:
        if self._may_write(event, buffer):
            self._write_delta(event.choice, Delta(refusal=event.text), buffer)

    def _on_tool_call(self, event: ToolCallDelta, buffer: bytearray) -> None:
        if not self._may_write(event, buffer):
            return
        function = FunctionAnswer(arguments=event.arguments)
        call = ToolCallAnswer(event.index, function=function)
        if self._begins_call(event):
            call.id = event.id or new_call_id()
            call.type = "function"
            function.name = event.name or ""
        if event.signature is not None:
            call.extra_content = signature_content(event.signature)
        delta = (
            Delta(function_call=function) if self._wants_function_call else Delta(tool_calls=[call])
        )
        self._write_delta(event.choice, delta, buffer)

    def _begins_call(self, event: ToolCallDelta) -> bool:
        """True once per call. A call may have begun in verbatim bytes; then its pieces bring neither id nor name."""
        key = (event.choice, event.index)
        if key in self._begun_calls:
            return False
        self._begun_calls.add(key)
        return not self._had_verbatim or event.id is not None or event.name is not None

    def _on_verbatim(self, event: Verbatim, buffer: bytearray) -> None:
        self._had_verbatim = True
        super()._on_verbatim(event, buffer)
