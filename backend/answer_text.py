"""The text of one choice to events: reasoning, answer and tool calls told apart."""

from __future__ import annotations

from backend.reasoning import ReasoningSplitter
from backend.tool_parser import CallParser
from plugins.events import Event, FinishReason, ReasoningDelta, TextDelta


class AnswerText:
    """`splitter`, `calls`: None where the model has no reasoning blocks, the request no tools."""

    def __init__(
        self, choice: int, splitter: ReasoningSplitter | None, calls: CallParser | None
    ) -> None:
        self._choice = choice
        self._splitter = splitter
        self._calls = calls

    @property
    def in_reasoning(self) -> bool:
        return self._splitter is not None and self._splitter.inside

    def feed(self, text: str) -> list[Event]:
        reasoning, answer = self._splitter.feed(text) if self._splitter else ("", text)
        return self._events(reasoning, answer)

    def finish(self) -> list[Event]:
        """What was held back, once no more text comes."""
        events = self._events(*self._splitter.finish()) if self._splitter else []
        return events + (self._calls.finish() if self._calls else [])

    def finish_reason(self, reason: FinishReason) -> FinishReason:
        """An answer that ends in calls says so; one that was cut says that."""
        called = self._calls is not None and self._calls.num_calls > 0
        return "tool_calls" if called and reason == "stop" else reason

    def _events(self, reasoning: str, answer: str) -> list[Event]:
        events: list[Event] = [ReasoningDelta(reasoning, self._choice)] if reasoning else []
        if answer and self._calls is not None:
            return events + self._calls.feed(answer)
        return [*events, TextDelta(answer, self._choice)] if answer else events
