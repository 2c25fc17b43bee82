"""Canonical OpenAI answers: what may go to a client byte for byte, decided by one strict typed decode.

Fields that stand here are checked; all others are skipped and pass with the bytes. What does not fit is not an error:
it takes the other lane (`openai_answer`), which reads dialects and writes the canonical form. Field meanings: OpenAI's
API reference, chat completions and completions.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from plugins.events import FinishReason, Started, Usage

Text = Annotated[str, Meta(min_length=1)]
ChatFinish = Literal["stop", "length", "tool_calls", "content_filter", "function_call"]
TextFinish = Literal["stop", "length", "content_filter"]
Index = Annotated[int, Meta(ge=0)]
Count = Annotated[int, Meta(ge=0)]
Never = Annotated[int, Meta(gt=0, lt=0)]  # no value fits: the key must not be there
ODD = msgspec.MsgspecError, UnicodeDecodeError, RecursionError
"""What a strict decode raises for an answer that is not canonical."""


class FunctionDelta(Struct, gc=False):
    name: Text | UnsetType = UNSET
    arguments: str = ""


class CustomDelta(Struct, gc=False):
    name: Text | UnsetType = UNSET
    input: str = ""


class ToolCallPiece(Struct, gc=False):
    index: Index
    function: FunctionDelta | UnsetType = UNSET
    custom: CustomDelta | UnsetType = UNSET
    id: Text | UnsetType = UNSET
    type: Literal["function", "custom"] | UnsetType = UNSET

    @property
    def name(self) -> Text | UnsetType:
        named = self.custom if self.function is UNSET else self.function
        return UNSET if named is UNSET else named.name


class Delta(Struct, gc=False):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: Annotated[list[ToolCallPiece], Meta(min_length=1)] | None = None
    function_call: Raw | None = None
    audio: Raw | None = None

    def has_other_content(self) -> bool:
        """Anything but text."""
        return bool(
            self.tool_calls
            or self.reasoning_content
            or self.reasoning
            or self.refusal
            or self.function_call
            or self.audio
        )


class ChatChunkChoice(Struct, gc=False):
    index: Index
    delta: Delta
    finish_reason: ChatFinish | None
    logprobs: Raw | None = None

    def has_content(self) -> bool:
        return bool(self.delta.content) or self.delta.has_other_content()

    def plain_text(self) -> str:
        """The text, if this piece holds nothing else."""
        if self.finish_reason is not None or self.logprobs is not None:
            return ""
        return "" if self.delta.has_other_content() else self.delta.content or ""


class TextChunkChoice(Struct, gc=False):
    index: Index
    text: str
    finish_reason: TextFinish | None
    logprobs: Raw | None = None

    def has_content(self) -> bool:
        return bool(self.text)

    def plain_text(self) -> str:
        return self.text if self.finish_reason is None and self.logprobs is None else ""


class Head(Struct, kw_only=True):
    """What every chunk and every whole answer begins with. An `error` key, even a null one, stops strict clients."""

    id: Text
    created: int
    model: Text
    system_fingerprint: str | None = None
    service_tier: str | None = None
    error: Never = 0


class ChatChunk(Head, kw_only=True):
    object: Literal["chat.completion.chunk"]
    choices: Annotated[list[ChatChunkChoice], Meta(min_length=1, max_length=1)]
    usage: None = None  # counts never pass verbatim: they become an event


class TextChunk(Head, kw_only=True):
    object: Literal["text_completion"]
    choices: Annotated[list[TextChunkChoice], Meta(min_length=1, max_length=1)]
    usage: None = None


class PromptDetails(Struct):
    cached_tokens: Count | None = None
    cache_write_tokens: Count | None = None


class CompletionDetails(Struct):
    reasoning_tokens: Count | None = None
    accepted_prediction_tokens: Count | None = None
    rejected_prediction_tokens: Count | None = None


class Counts(Struct):
    prompt_tokens: Count
    completion_tokens: Count = 0  # embeddings have none
    prompt_tokens_details: PromptDetails | None = None
    completion_tokens_details: CompletionDetails | None = None
    prompt_cache_hit_tokens: Count | None = None  # DeepSeek's place for cached tokens
    cached_tokens: Count | None = None  # Moonshot's


class Function(Struct):
    name: Text
    arguments: str


class ToolCall(Struct):
    id: Text
    type: Literal["function", "custom"]
    function: Function | UnsetType = UNSET
    custom: Raw | UnsetType = UNSET


class AnswerMessage(Struct):
    role: Literal["assistant"]
    content: str | None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(Struct):
    index: Index
    message: AnswerMessage
    finish_reason: ChatFinish


class TextChoice(Struct):
    index: Index
    text: str
    finish_reason: TextFinish


class ChatAnswer(Head, kw_only=True):
    object: Literal["chat.completion"]
    choices: Annotated[list[ChatChoice], Meta(min_length=1)]
    usage: Counts | None = None


class TextAnswer(Head, kw_only=True):
    object: Literal["text_completion"]
    choices: Annotated[list[TextChoice], Meta(min_length=1)]
    usage: Counts | None = None


class EmbeddingEntry(Struct, gc=False):
    object: Literal["embedding"]
    index: Index
    embedding: Raw  # numbers, or base64 of them


class EmbeddingsAnswer(Struct, kw_only=True):
    object: Literal["list"]
    data: list[EmbeddingEntry]
    model: Text
    usage: Counts
    error: Never = 0


decode_chat_chunk = msgspec.json.Decoder(ChatChunk).decode
decode_text_chunk = msgspec.json.Decoder(TextChunk).decode
decode_chat_answer = msgspec.json.Decoder(ChatAnswer).decode
decode_text_answer = msgspec.json.Decoder(TextAnswer).decode
decode_embeddings_answer = msgspec.json.Decoder(EmbeddingsAnswer).decode

FINISH_REASONS: dict[str, FinishReason] = {
    "stop": "stop",
    "length": "length",
    "tool_calls": "tool_calls",
    "function_call": "tool_calls",
    "content_filter": "content_filter",
}


def started_of(head: Head) -> Started:
    return Started(head.id, head.model, head.created, head.system_fingerprint, head.service_tier)


def usage_of(counts: Counts) -> Usage:
    prompt, completion = counts.prompt_tokens_details, counts.completion_tokens_details
    cached = prompt and prompt.cached_tokens
    return Usage(
        counts.prompt_tokens,
        counts.completion_tokens,
        cached or counts.prompt_cache_hit_tokens or counts.cached_tokens or 0,
        (prompt and prompt.cache_write_tokens) or 0,
        (completion and completion.reasoning_tokens) or 0,
        (completion and completion.accepted_prediction_tokens) or 0,
        (completion and completion.rejected_prediction_tokens) or 0,
    )
