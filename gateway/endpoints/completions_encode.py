"""Completions answers, streamed and whole: `text_completion` objects both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gateway.endpoints.completions_answer import (
    CompletionChoice,
    LogprobLists,
    logprob_lists,
)
from gateway.endpoints.openai_collect import OpenAICollector
from gateway.endpoints.openai_stream import OpenAIStreamEncoder
from plugins.events import Event, Finished, Request, TextDelta


class CompletionsStreamEncoder(OpenAIStreamEncoder):
    object_name = "text_completion"
    id_prefix = "cmpl-"

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        self._positions: dict[int, int] = {}  # characters written so far, by choice

    def _content_writers(self) -> dict[type[Any], Callable[[Any, bytearray], None]]:
        return {TextDelta: self._on_text}

    def _write_first(self, choice: int, buffer: bytearray, event: Event) -> None:
        """Nothing: text has no role."""

    def _write_finish(self, event: Finished, buffer: bytearray) -> None:
        self._write_choice(CompletionChoice("", event.choice, finish_reason=event.reason), buffer)

    def _on_text(self, event: TextDelta, buffer: bytearray) -> None:
        if not self._may_write(event, buffer) or not (event.text or event.logprobs):
            return
        choice = CompletionChoice(event.text, event.choice)
        if event.logprobs and self._request.sampling.logprobs:
            position = self._positions.get(event.choice, 0)
            choice.logprobs = logprob_lists(event, position)
            self._positions[event.choice] = position + len(event.text)
        self._write_choice(choice, buffer)


@dataclass(slots=True)
class _Text:
    """What came for one choice so far."""

    pieces: list[str] = field(default_factory=list[str])
    num_chars: int = 0
    logprobs: LogprobLists = field(default_factory=lambda: LogprobLists([], [], [], []))


class CompletionsCollector(OpenAICollector[_Text]):
    object_name = "text_completion"
    id_prefix = "cmpl-"
    new_choice = _Text

    def _add_content(self, choice: _Text, event: Event) -> None:
        if not isinstance(event, TextDelta):
            return
        if event.logprobs:
            lists = logprob_lists(event, choice.num_chars)
            choice.logprobs.tokens += lists.tokens
            choice.logprobs.token_logprobs += lists.token_logprobs
            choice.logprobs.top_logprobs += lists.top_logprobs
            choice.logprobs.text_offset += lists.text_offset
        choice.pieces.append(event.text)
        choice.num_chars += len(event.text)

    def _answer(self, choice: _Text, finished: Finished) -> CompletionChoice:
        logprobs = choice.logprobs if self._request.sampling.logprobs else None
        return CompletionChoice("".join(choice.pieces), finished.choice, logprobs, finished.reason)
