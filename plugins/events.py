"""The one internal vocabulary. Every dialect decodes to a `Request`; every provider answers in `Event`s.

A non-streaming answer is the same events, collected. Rules (limits, filters, cost, cancellation, retries) are
written against these types only, so that they hold on every endpoint, streamed or not, online or batch.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from typing import Any, Literal

from msgspec import Struct, field

Dialect = Literal["chat", "completions", "responses", "messages", "embeddings"]
Role = Literal["system", "developer", "user", "assistant", "tool"]
FinishReason = Literal["stop", "length", "tool_calls", "content_filter"]
Json = dict[str, Any]


# -- What a request is made of ---------------------------------------------------------------------------------------


class Text(Struct, tag="text"):
    text: str
    cache_control: Json | None = (
        None  # a prompt-cache breakpoint after this part, as the client wrote it
    )


class Media(Struct, tag="media"):
    """An image, audio clip or document: by URL, by bytes (base64), or by the id of an uploaded file."""

    kind: Literal["image", "audio", "file"]
    url: str | None = None
    data_base64: str | None = None
    media_type: str | None = None
    file_id: str | None = None
    filename: str | None = None
    detail: str | None = None
    cache_control: Json | None = None


class Reasoning(Struct, tag="reasoning"):
    """A thinking block. `signature` and `redacted` go back to the provider that made them unchanged."""

    text: str = ""
    signature: str | None = None
    redacted: str | None = None


class Refusal(Struct, tag="refusal"):
    text: str


class ToolCall(Struct, tag="tool_call"):
    id: str
    name: str
    arguments: str  # JSON text
    signature: str | None = None  # Gemini's thought signature
    kind: Literal["function", "custom"] = "function"


class ToolResult(Struct, tag="tool_result"):
    tool_call_id: str
    parts: list[Text | Media] = field(default_factory=list["Text | Media"])
    is_error: bool = False
    name: str | None = None
    cache_control: Json | None = None


Part = Text | Media | Reasoning | Refusal | ToolCall | ToolResult


class Message(Struct):
    role: Role
    parts: list[Part]
    name: str | None = None


class Tool(Struct):
    name: str
    description: str | None = None
    parameters: Json | None = None  # JSON Schema; None: no arguments
    strict: bool | None = None
    kind: Literal["function", "custom"] = "function"
    extra: Json | None = None  # what only one provider knows: cache_control, a custom tool's format


class ToolChoice(Struct):
    mode: Literal["none", "auto", "required", "named", "allowed"]
    names: list[str] = field(default_factory=list[str])  # one for "named", some for "allowed"
    allowed_mode: Literal["auto", "required"] = "auto"


class ResponseFormat(Struct):
    kind: Literal["text", "json_object", "json_schema", "regex", "grammar"]
    schema: Json | None = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    pattern: str | None = None  # of "regex" and "grammar"


class Sampling(Struct):
    """How to draw tokens. None means: not given, the provider's own default holds."""

    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    n: int = 1
    best_of: int | None = None
    seed: int | None = None
    stop: list[str] = field(default_factory=list[str])
    stop_token_ids: list[int] = field(default_factory=list[int])
    ignore_eos: bool = False
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    logprobs: bool = False
    top_logprobs: int = 0
    echo: bool = False
    prompt_logprobs: bool = False


class EmbeddingForm(Struct):
    """How an embeddings request wants its vectors. `dimensions` None: as many as the model has."""

    dimensions: int | None = None
    encoding_format: Literal["float", "base64"] = "float"


class Request(Struct):
    """One request in the internal form, whatever the dialect it came in.

    `messages` (chat-like dialects) or `prompts` (completions: text or token ids; embeddings: inputs) hold the content.
    `body` is what the client sent; a provider of the same dialect may forward it (`Call.verbatim`).
    """

    id: str  # "req_..." : shown to the client, in every log line, span and usage row
    dialect: Dialect
    model: str  # as the client named it
    messages: list[Message] = field(default_factory=list[Message])
    prompts: list[str | list[int]] = field(default_factory=list["str | list[int]"])
    sampling: Sampling = field(default_factory=Sampling)
    embedding: EmbeddingForm = field(default_factory=EmbeddingForm)
    stream: bool = False
    include_usage: bool = False
    tools: list[Tool] = field(default_factory=list[Tool])
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: str | None = None
    reasoning_budget_tokens: int | None = None
    user: str | None = None
    metadata: Json | None = None
    service_tier: str | None = None
    klass: Literal["interactive", "standard", "flex", "batch"] = "standard"
    extra: Json = field(
        default_factory=dict[str, Any]
    )  # top-level fields that this vocabulary has no word for
    body: bytes = b""
    received_s: float = (
        0.0  # clock of the gateway process, when the last byte of the body was there
    )


# -- What an answer is made of ---------------------------------------------------------------------------------------


class TokenLogprob(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int] | None = None
    top: list[TokenLogprob] = field(default_factory=list["TokenLogprob"])


class Started(Struct, frozen=True, tag_field="event", tag="started"):
    """First event of an answer. Every chunk that a client sees carries this id, time and model."""

    id: str
    model: str  # as the provider names it
    created_s: int
    fingerprint: str | None = None
    service_tier: str | None = None


class TextDelta(Struct, frozen=True, tag_field="event", tag="text"):
    text: str
    choice: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()  # of the tokens in `text`
    text_offsets: tuple[
        int, ...
    ] = ()  # completions: where each of those tokens begins in the choice's text


class ReasoningDelta(Struct, frozen=True, tag_field="event", tag="reasoning"):
    text: str = ""
    choice: int = 0
    signature: str | None = None
    redacted: str | None = None


class RefusalDelta(Struct, frozen=True, tag_field="event", tag="refusal"):
    text: str
    choice: int = 0


class ToolCallDelta(Struct, frozen=True, tag_field="event", tag="tool_call"):
    """A piece of one call. `index` counts tool calls of the choice from 0; `id` and `name` come once, first."""

    index: int
    choice: int = 0
    id: str | None = None
    name: str | None = None
    arguments: str = ""
    signature: str | None = None


class Embedding(Struct, frozen=True, tag_field="event", tag="embedding"):
    """The vector of input number `index`: float32 values, little-endian, as base64 answers carry them.

    An answer has one for each input, in any order, and one `Finished` behind them all.
    """

    data: bytes
    index: int = 0

    @classmethod
    def of(cls, values: Iterable[float], index: int = 0) -> Embedding:
        return cls(_little_endian(array("f", values)).tobytes(), index)

    def values(self) -> list[float]:
        return _little_endian(array("f", self.data)).tolist()


def _little_endian(numbers: array[float]) -> array[float]:
    """Between memory and wire, either way."""
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


class Usage(Struct, frozen=True, omit_defaults=True, tag_field="event", tag="usage"):
    """Token counts, normalised once: `prompt_tokens` include cached ones, `completion_tokens` reasoning."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    cache_write_tokens: int = 0
    reasoning_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0
    estimated: bool = False  # counted by the gateway because the provider gave none


class Finished(Struct, frozen=True, tag_field="event", tag="finished"):
    """End of one choice. An answer with n choices has n of these; embeddings, one in all."""

    reason: FinishReason
    choice: int = 0
    stop_sequence: str | None = None


class Verbatim(Struct, frozen=True, tag_field="event", tag="verbatim"):
    """The fast lane: bytes of the client's own dialect, checked and ready to send.

    In a stream, whole SSE events (`data: ...` and a blank line each); else the whole JSON body. What rules need from
    inside is told beside it: `finished` lists the choices that end in these bytes, `has_content` whether content began.
    """

    data: bytes
    has_content: bool = True
    num_chunks: int = 1  # content chunks inside: a floor for the tokens when no usage comes
    finished: tuple[Finished, ...] = ()


class Failed(Struct, frozen=True, tag_field="event", tag="failed"):
    """The answer broke after content had begun. Nothing follows it."""

    message: str
    type: str = "server_error"
    code: str | None = None
    status: int = 502


Event = (
    Started
    | TextDelta
    | ReasoningDelta
    | RefusalDelta
    | ToolCallDelta
    | Embedding
    | Usage
    | Finished
    | Verbatim
    | Failed
)
CHOICE_EVENTS = (TextDelta, ReasoningDelta, RefusalDelta, ToolCallDelta, Finished)
CONTENT_EVENTS = (*CHOICE_EVENTS, Embedding)


def has_content(events: list[Event]) -> bool:
    """True once an answer can no longer be retried unseen: content or an end is among the events."""
    for event in events:
        if isinstance(event, Verbatim):
            if event.has_content:
                return True
        elif isinstance(event, CONTENT_EVENTS):
            return True
    return False


def is_ended(events: list[Event]) -> bool:
    """True where a choice ends among the events. An answer without any end is not whole."""
    return any(
        isinstance(event, Finished) or (isinstance(event, Verbatim) and bool(event.finished))
        for event in events
    )
