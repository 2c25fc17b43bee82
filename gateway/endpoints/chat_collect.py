"""Chat answers as one `chat.completion` object."""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec import UNSET

from gateway.endpoints.chat_answer import (
    Choice,
    FunctionAnswer,
    LogprobsAnswer,
    MessageAnswer,
    ThinkingAnswer,
    TokenLogprobAnswer,
    ToolCallAnswer,
    closes_block,
    logprob_answers,
    signature_content,
    thinking_answer,
)
from gateway.endpoints.chat_encode import new_call_id
from gateway.endpoints.chat_tools import asked_in_functions
from gateway.endpoints.openai_collect import OpenAICollector
from plugins.events import (
    Event,
    Finished,
    ReasoningDelta,
    RefusalDelta,
    Request,
    TextDelta,
    ToolCallDelta,
)


@dataclass(slots=True)
class _Call:
    id: str = ""
    name: str = ""
    arguments: list[str] = field(default_factory=list[str])
    signature: str | None = None


@dataclass(slots=True)
class _Message:
    """What came for one choice so far."""

    text: list[str] = field(default_factory=list[str])
    refusal: list[str] = field(default_factory=list[str])
    reasoning: list[str] = field(default_factory=list[str])
    open_block: list[str] = field(default_factory=list[str])
    blocks: list[ThinkingAnswer] = field(default_factory=list[ThinkingAnswer])
    calls: dict[int, _Call] = field(default_factory=dict[int, _Call])
    logprobs: list[TokenLogprobAnswer] = field(default_factory=list[TokenLogprobAnswer])


class ChatCollector(OpenAICollector[_Message]):
    object_name = "chat.completion"
    id_prefix = "chatcmpl-"
    new_choice = _Message

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        self._wants_function_call = asked_in_functions(request)

    def _add_content(self, choice: _Message, event: Event) -> None:
        if isinstance(event, TextDelta):
            choice.text.append(event.text)
            if event.logprobs:
                choice.logprobs += logprob_answers(event.logprobs)
        elif isinstance(event, ReasoningDelta):
            _add_reasoning(choice, event)
        elif isinstance(event, RefusalDelta):
            choice.refusal.append(event.text)
        elif isinstance(event, ToolCallDelta):
            _add_call(choice, event)

    def _answer(self, choice: _Message, finished: Finished) -> Choice:
        reason: str = finished.reason
        answer = _message_of(choice)
        if self._wants_function_call and answer.tool_calls:
            answer.function_call = answer.tool_calls[0].function
            answer.tool_calls = UNSET
            reason = "function_call" if reason == "tool_calls" else reason
        logprobs = LogprobsAnswer(choice.logprobs) if self._request.sampling.logprobs else None
        return Choice(finished.choice, answer, logprobs, reason)


def _add_reasoning(message: _Message, event: ReasoningDelta) -> None:
    message.reasoning.append(event.text)
    message.open_block.append(event.text)
    if closes_block(event):
        message.blocks.append(thinking_answer("".join(message.open_block), event))
        message.open_block.clear()


def _add_call(message: _Message, event: ToolCallDelta) -> None:
    call = message.calls.setdefault(event.index, _Call())
    call.id = call.id or event.id or ""
    call.name = call.name or event.name or ""
    call.arguments.append(event.arguments)
    call.signature = call.signature or event.signature


def _message_of(message: _Message) -> MessageAnswer:
    text = "".join(message.text)
    refusal = "".join(message.refusal)
    answer = MessageAnswer(
        content=None if not text and (message.calls or refusal) else text,
        refusal=refusal or None,
    )
    if any(message.reasoning):
        answer.reasoning_content = "".join(message.reasoning)
    if message.blocks:
        answer.thinking_blocks = message.blocks
    if message.calls:
        answer.tool_calls = [_call_answer(call) for _, call in sorted(message.calls.items())]
    return answer


def _call_answer(call: _Call) -> ToolCallAnswer:
    answer = ToolCallAnswer(
        id=call.id or new_call_id(),
        type="function",
        function=FunctionAnswer(call.name, "".join(call.arguments)),
    )
    if call.signature is not None:
        answer.extra_content = signature_content(call.signature)
    return answer
