"""Shapes of a chat answer on the wire, streamed and whole. UNSET fields are left out, None is null."""

from __future__ import annotations

from msgspec import UNSET, Struct, UnsetType

from gateway.endpoints.openai_answer import finite_logprob
from plugins.events import Json, ReasoningDelta, TokenLogprob


class TopLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprobAnswer(Struct):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class LogprobsAnswer(Struct):
    content: list[TokenLogprobAnswer]
    refusal: None = None


class FunctionAnswer(Struct):
    name: str | UnsetType = UNSET
    arguments: str = ""


class ToolCallAnswer(Struct):
    """`index` is part of streams only; `id`, `type` and the name come once per call."""

    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: FunctionAnswer | UnsetType = UNSET
    extra_content: Json | UnsetType = UNSET


class ThinkingAnswer(Struct):
    """A block that its provider wants back unchanged; beside `reasoning_content`, which is for people."""

    type: str
    thinking: str | UnsetType = UNSET
    signature: str | UnsetType = UNSET
    data: str | UnsetType = UNSET


class Delta(Struct):
    role: str | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    refusal: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    thinking_blocks: list[ThinkingAnswer] | UnsetType = UNSET
    tool_calls: list[ToolCallAnswer] | UnsetType = UNSET
    function_call: FunctionAnswer | UnsetType = UNSET


class ChunkChoice(Struct):
    index: int
    delta: Delta
    logprobs: LogprobsAnswer | None = None
    finish_reason: str | None = None


class MessageAnswer(Struct, kw_only=True):
    role: str = "assistant"
    content: str | None
    refusal: str | None
    annotations: list[Json] = []
    reasoning_content: str | UnsetType = UNSET
    thinking_blocks: list[ThinkingAnswer] | UnsetType = UNSET
    tool_calls: list[ToolCallAnswer] | UnsetType = UNSET
    function_call: FunctionAnswer | UnsetType = UNSET


class Choice(Struct):
    index: int
    message: MessageAnswer
    logprobs: LogprobsAnswer | None
    finish_reason: str


def logprob_answers(logprobs: tuple[TokenLogprob, ...]) -> list[TokenLogprobAnswer]:
    return [
        TokenLogprobAnswer(
            entry.token,
            finite_logprob(entry.logprob),
            entry.bytes,
            [TopLogprob(top.token, finite_logprob(top.logprob), top.bytes) for top in entry.top],
        )
        for entry in logprobs
    ]


def thinking_answer(text: str, event: ReasoningDelta) -> ThinkingAnswer:
    """The block that `event`, the last of it, closes; `text` is all of its text."""
    if event.redacted is not None:
        return ThinkingAnswer("redacted_thinking", data=event.redacted)
    return ThinkingAnswer("thinking", text, event.signature or UNSET)


def closes_block(event: ReasoningDelta) -> bool:
    """A signature or redacted data comes last, and only such blocks must come back unchanged."""
    return event.signature is not None or event.redacted is not None


def signature_content(signature: str) -> Json:
    """Where Google's own OpenAI-shaped API puts a thought signature, and clients send it back from."""
    return {"google": {"thought_signature": signature}}
