"""Embeddings answers: vectors in the order of the inputs, as numbers or as base64."""

from __future__ import annotations

import base64
from typing import Literal

import msgspec
from msgspec import Raw, Struct

from gateway.accounting import estimate_prompt_tokens
from gateway.errors import as_error
from plugins.errors import UpstreamUnavailable
from plugins.events import Embedding, Event, Failed, Finished, Request, Started, Usage, Verbatim


class EmbeddingEntry(Struct):
    object: Literal["embedding"]
    index: int
    embedding: Raw  # numbers, or base64 of them


class EmbeddingsUsage(Struct):
    prompt_tokens: int
    total_tokens: int


class EmbeddingsAnswer(Struct):
    object: Literal["list"]
    data: list[EmbeddingEntry]
    model: str
    usage: EmbeddingsUsage


class EmbeddingsCollector:
    """See `gateway.endpoints.dialect.Collector`. A verbatim body is the answer, untouched.

    Each vector is written when it comes: thousands at the end would hold up everybody else.
    """

    def __init__(self, request: Request) -> None:
        self._request = request
        self._model = request.model
        self._usage: Usage | None = None
        self._verbatim = b""
        self._failed: Failed | None = None
        self._entries: dict[int, EmbeddingEntry] = {}
        self._finished = False

    def add(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Embedding):
                self._entries[event.index] = self._entry(event)
            elif isinstance(event, Started):
                self._model = event.model or self._model
            elif isinstance(event, Usage):
                self._usage = event
            elif isinstance(event, Finished):
                self._finished = True
            elif isinstance(event, Verbatim):
                self._verbatim += event.data
            elif isinstance(event, Failed):
                self._failed = event

    def body(self) -> bytes:
        """Raises UpstreamError as it came, or UpstreamUnavailable where an input has no vector."""
        if self._failed is not None:
            raise as_error(self._failed)
        if self._verbatim:
            return self._verbatim
        indexes = range(len(self._request.prompts))
        if not self._finished or self._entries.keys() != set(indexes):
            raise UpstreamUnavailable(
                f"The upstream answered {len(indexes)} inputs with {len(self._entries)} embeddings."
            )
        data = [self._entries[index] for index in indexes]
        return msgspec.json.encode(
            EmbeddingsAnswer("list", data, self._model, self._usage_answer())
        )

    def _entry(self, vector: Embedding) -> EmbeddingEntry:
        as_text = self._request.embedding.encoding_format == "base64"
        written = base64.b64encode(vector.data).decode() if as_text else vector.values()
        return EmbeddingEntry("embedding", vector.index, Raw(msgspec.json.encode(written)))

    def _usage_answer(self) -> EmbeddingsUsage:
        """Clients rely on the counts: where a provider gives none they are those of the usage row."""
        usage = self._usage
        prompt = estimate_prompt_tokens(self._request) if usage is None else usage.prompt_tokens
        return EmbeddingsUsage(prompt, prompt + (usage.completion_tokens if usage else 0))
