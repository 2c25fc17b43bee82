"""The frame of whole chat and completions answers: the same events as a stream, gathered by choice."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import Struct

from gateway.endpoints.openai_answer import new_answer, started_or_made, usage_answer
from gateway.errors import as_error
from plugins.errors import UpstreamUnavailable
from plugins.events import (
    CHOICE_EVENTS,
    Event,
    Failed,
    Finished,
    ReasoningDelta,
    RefusalDelta,
    Request,
    Started,
    TextDelta,
    ToolCallDelta,
    Usage,
    Verbatim,
)

_C = TypeVar("_C")
ContentEvent = TextDelta | ReasoningDelta | RefusalDelta | ToolCallDelta | Finished


class OpenAICollector(ABC, Generic[_C]):
    """Base of the two collectors. A verbatim body is the answer, untouched."""

    object_name: str
    id_prefix: str
    new_choice: Callable[[], Any]

    def __init__(self, request: Request) -> None:
        self._request = request
        self._started: Started | None = None
        self._usage: Usage | None = None
        self._verbatim: list[bytes] = []
        self._failed: Failed | None = None
        self._open: dict[int, _C] = {}
        self._finished: dict[int, Finished] = {}

    def add(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, CHOICE_EVENTS):
                self._add_to_choice(event)
            elif isinstance(event, Started):
                self._started = self._started or event
            elif isinstance(event, Usage):
                self._usage = event
            elif isinstance(event, Verbatim):
                self._verbatim.append(event.data)
            elif isinstance(event, Failed):
                self._failed = event

    def body(self) -> bytes:
        """Raises UpstreamError as it came, or UpstreamUnavailable where the answer is not whole."""
        if self._failed is not None:
            raise as_error(self._failed)
        if self._verbatim:
            return b"".join(self._verbatim)
        if not self._finished or self._finished.keys() != self._open.keys():
            raise UpstreamUnavailable("The upstream ended its answer before it was complete.")
        started = started_or_made(self._started, self._request, self.id_prefix)
        choices = [self._answer(self._open[i], self._finished[i]) for i in sorted(self._open)]
        answer = new_answer(started, self.object_name, choices)
        if self._usage is not None:
            answer.usage = usage_answer(self._usage)
        return msgspec.json.encode(answer)

    # -- For the dialects --------------------------------------------------------------------------------------------

    @abstractmethod
    def _add_content(self, choice: _C, event: Event) -> None: ...

    @abstractmethod
    def _answer(self, choice: _C, finished: Finished) -> Struct:
        """The choice as it stands in the answer."""
        ...

    def _add_to_choice(self, event: ContentEvent) -> None:
        if event.choice in self._finished:
            return
        choice = self._open.get(event.choice)
        if choice is None:
            choice = self._open[event.choice] = self.new_choice()
        if isinstance(event, Finished):
            self._finished[event.choice] = event
        else:
            self._add_content(choice, event)
