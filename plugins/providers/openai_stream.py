"""Server-sent chunks -> events. Canonical chunks pass as bytes, all those of one read joined; odd ones are read."""

from __future__ import annotations

from typing import Protocol

from plugins.errors import UpstreamError, UpstreamUnavailable
from plugins.events import Event, Json
from plugins.providers.lenient_json import an_object, parse_json
from plugins.providers.openai_answer import AnswerReader
from plugins.providers.openai_errors import ErrorReader, is_error
from plugins.providers.openai_state import AnswerState
from plugins.sse import EventTooLarge, SSEEvent, SSEParser


class Lane(Protocol):
    """A quick way for the common chunk: as bytes, or as a piece of text."""

    def take(self, data: bytes) -> bool:
        """Whether this chunk is read with this; if not, nothing has changed."""
        ...

    def flush(self, events: list[Event]) -> None:
        """Hand over what was taken, before anything else is read."""
        ...


class StreamReader:
    """Feed it the body as it comes, until `done` or `failure`. What it returned before a failure still counts.

    `done`: the answer is complete, nothing after it matters.
    """

    def __init__(
        self,
        *,
        provider: str,
        num_choices: int,
        state: AnswerState,
        lane: Lane,
        answer: AnswerReader,
        errors: ErrorReader,
    ) -> None:
        self.done = False
        self.failure: UpstreamError | None = None
        self._provider = provider
        self._num_choices = num_choices
        self._state = state
        self._lane = lane
        self._answer = answer
        self._errors = errors
        self._parser = SSEParser()

    @property
    def only_usage_is_missing(self) -> bool:
        """Every choice that was asked for has ended; nothing else that a client would miss can follow."""
        return self._state.all_finished(self._num_choices)

    def feed(self, data: bytes) -> list[Event]:
        try:
            return self._read(self._parser.feed(data))
        except EventTooLarge as exc:
            return self._fail(UpstreamUnavailable(f"provider {self._provider}: {exc}"))

    def end(self, broken: UpstreamError | None = None) -> list[Event]:
        """The body ended, or `broken` ended it. Sets `done` where the answer was complete, else `failure`."""
        events = self._read(self._parser.finish()) if broken is None else []
        if self.done or self.failure is not None:
            return events
        if self._state.all_finished(1 if broken is None else self._num_choices):
            return events + self._complete()
        cut = f"provider {self._provider}: the stream ended before the answer was complete"
        self.failure = broken or UpstreamUnavailable(cut)
        return events

    def _read(self, sse_events: list[SSEEvent]) -> list[Event]:
        events: list[Event] = []
        lane = self._lane
        for event in sse_events:
            if event.data[:1] == b"{" and event.event != "error" and lane.take(event.data):
                continue
            lane.flush(events)
            events += self._read_odd(event)
            if self.done or self.failure is not None:
                return events
        lane.flush(events)
        return events

    def _read_odd(self, event: SSEEvent) -> list[Event]:
        data = event.data.strip()
        if data.startswith(b"[DONE]"):
            return self._end_as_told()
        if (
            not data or data == b"null" or data.startswith(b":")
        ):  # keep-alives that should be comments
            return []
        try:
            document: Json = an_object(parse_json(data))
        except ValueError:
            broken = f"provider {self._provider}: sent a piece of its stream that is not JSON"
            return self._fail(UpstreamUnavailable(broken))
        if is_error(document, event.event):
            return self._fail(self._errors.from_document(document))
        try:
            return self._answer.read(document)
        except UpstreamError as error:
            return self._fail(error)

    def _end_as_told(self) -> list[Event]:
        if self._state.choices:
            return self._complete()
        empty = f"provider {self._provider}: the stream ended without an answer"
        return self._fail(UpstreamUnavailable(empty))

    def _complete(self) -> list[Event]:
        self.done = True
        return self._answer.end()

    def _fail(self, error: UpstreamError) -> list[Event]:
        self.failure = error
        return []
