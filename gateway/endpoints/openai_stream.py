"""The frame of chat and completions streams: who sends which chunk when, the same for both.

A dialect adds its chunk's shape and what it writes for content events.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import Struct

from gateway.endpoints.openai_answer import Answer, new_answer, started_or_made, usage_answer
from gateway.errors import openai_error_body
from gateway.streaming import CONTENT_TYPE, DONE, Choices, write_event
from plugins.errors import GatewayError, UpstreamError, UpstreamUnavailable
from plugins.events import Event, Failed, Finished, Request, Started, Usage, Verbatim


class VerbatimChoice(Struct):
    index: int = 0


class VerbatimChunk(Struct):
    choices: list[VerbatimChoice] | None = None


_verbatim_decoder = msgspec.json.Decoder(VerbatimChunk)


class OpenAIStreamEncoder(ABC):
    """Base of the two encoders.

    What it writes is a well-formed stream whatever the order of events: nothing follows the end of a choice, an error,
    or [DONE]. Verbatim bytes pass as they are; the first chunks of the choices in them count as written.
    """

    content_type = CONTENT_TYPE
    object_name: str
    id_prefix: str

    def __init__(self, request: Request) -> None:
        self._request = request
        self._has_one_choice = request.sampling.n == 1 and len(request.prompts) <= 1
        self._choices = Choices()
        self._usage: Usage | None = None
        self._closed = False
        self._head: Answer | None = None
        self._writers: dict[type[Any], Callable[[Any, bytearray], None]] = {
            Started: self._on_started,
            Usage: self._on_usage,
            Verbatim: self._on_verbatim,
            Finished: self._on_finished,
            Failed: self._on_failed,
            **self._content_writers(),
        }

    @property
    def finished(self) -> bool:
        return self._choices.all_ended

    def encode(self, events: list[Event]) -> bytes:
        buffer = bytearray()
        for event in events:
            if self._closed:
                break
            writer = self._writers.get(type(event))
            if writer is not None:
                writer(event, buffer)
        return bytes(buffer)

    def end(self) -> bytes:
        if self._closed:
            return b""
        if not self.finished:
            raise UpstreamUnavailable("The upstream ended its answer before it was complete.")
        self._closed = True
        buffer = bytearray()
        if self._request.include_usage and self._usage is not None:
            self._write_usage(buffer, self._usage)
        buffer += DONE
        return bytes(buffer)

    def error(self, error: GatewayError) -> bytes:
        if self._closed:
            return b""
        self._closed = True
        return b"data: " + openai_error_body(error) + b"\n\n" + DONE

    # -- For the dialects --------------------------------------------------------------------------------------------

    @abstractmethod
    def _content_writers(self) -> dict[type[Any], Callable[[Any, bytearray], None]]: ...

    @abstractmethod
    def _write_first(self, choice: int, buffer: bytearray, event: Event) -> None:
        """The first chunk of a choice, in front of `event`."""
        ...

    @abstractmethod
    def _write_finish(self, event: Finished, buffer: bytearray) -> None: ...

    def _may_write(self, event: Any, buffer: bytearray) -> bool:
        """Opens the event's choice if need be; False where that choice has ended."""
        choices = self._choices
        if event.choice in choices.open:
            return True
        if not choices.begin(event.choice):
            return False
        self._write_first(event.choice, buffer, event)
        return True

    def _write_choice(self, choice: Struct, buffer: bytearray) -> None:
        head = self._head or self._make_head(None)
        head.choices = [choice]
        write_event(buffer, head)

    # -- The frame ---------------------------------------------------------------------------------------------------

    def _make_head(self, started: Started | None) -> Answer:
        known = started_or_made(started, self._request, self.id_prefix)
        head = self._head = new_answer(known, self.object_name, [])
        if self._request.include_usage:
            head.usage = None
        return head

    def _on_started(self, event: Started, buffer: bytearray) -> None:
        if self._head is None:
            self._make_head(event)

    def _on_usage(self, event: Usage, buffer: bytearray) -> None:
        self._usage = event  # counts are totals: the last one holds

    def _on_verbatim(self, event: Verbatim, buffer: bytearray) -> None:
        buffer += event.data
        if self._has_one_choice and event.has_content:
            self._choices.begin(0)
        else:
            for index in _choices_in(event.data):
                self._choices.begin(index)
        for finished in event.finished:
            self._choices.end(finished.choice)

    def _on_finished(self, event: Finished, buffer: bytearray) -> None:
        if self._may_write(event, buffer):
            self._choices.end(event.choice)
            self._write_finish(event, buffer)

    def _on_failed(self, event: Failed, buffer: bytearray) -> None:
        error = UpstreamError(event.message, type=event.type, code=event.code, status=event.status)
        buffer += self.error(error)

    def _write_usage(self, buffer: bytearray, usage: Usage) -> None:
        head = self._head or self._make_head(None)
        head.choices = []
        head.usage = usage_answer(usage)
        write_event(buffer, head)


def _choices_in(data: bytes) -> list[int]:
    """The choices that verbatim events speak of; needed where it is not plain from the request."""
    events = [line[6:] for line in data.split(b"\n") if line.startswith(b"data: {")]
    chunks = [_verbatim_decoder.decode(event) for event in events]
    return [choice.index for chunk in chunks for choice in chunk.choices or ()]
