"""Most chunks of most streams are a piece of text and nothing else: read those by one typed decode."""

from __future__ import annotations

from collections.abc import Callable

from plugins.events import Dialect, Event, TextDelta
from plugins.providers.openai_state import AnswerState
from plugins.providers.openai_wire import (
    ODD,
    ChatChunk,
    TextChunk,
    decode_chat_chunk,
    decode_text_chunk,
)


class TextLane:
    """Takes plain pieces of text of choices that have begun; whatever else comes is for `AnswerReader`."""

    __slots__ = ("_decode", "_events", "_state")

    def __init__(self, dialect: Dialect, state: AnswerState) -> None:
        self._decode: Callable[[bytes], ChatChunk | TextChunk] = (
            decode_text_chunk if dialect == "completions" else decode_chat_chunk
        )
        self._state = state
        self._events: list[Event] = []

    def take(self, data: bytes) -> bool:
        """Whether this chunk was a piece of text. If not, nothing has changed."""
        try:
            choice = self._decode(data).choices[0]
        except ODD:
            return False
        known = self._state.choices.get(choice.index)
        if known is None or known.finished or known.high_surrogate:
            return False
        text = choice.plain_text()
        if not text:
            return False
        self._events.append(TextDelta(text, choice.index))
        return True

    def flush(self, events: list[Event]) -> None:
        events += self._events
        self._events.clear()
