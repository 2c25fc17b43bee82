"""The lane of bytes: chunks that are canonical, and fit what came before, pass to the client untouched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec import UNSET

from plugins.events import Dialect, Event, Finished, Started, Verbatim
from plugins.providers.openai_state import AnswerState, CallState, ChoiceState
from plugins.providers.openai_wire import (
    FINISH_REASONS,
    ODD,
    ChatChunk,
    ChatChunkChoice,
    TextChunk,
    TextChunkChoice,
    ToolCallPiece,
    decode_chat_chunk,
    decode_text_chunk,
    started_of,
)


class VerbatimLane:
    """Takes canonical chunks of one read and hands them over joined, as one event and so as one write."""

    __slots__ = (
        "_accept",
        "_decode",
        "_finished",
        "_has_content",
        "_num_chunks",
        "_pieces",
        "_started",
        "_state",
    )

    def __init__(self, dialect: Dialect, state: AnswerState) -> None:
        self._state = state
        self._decode: Callable[[bytes], ChatChunk | TextChunk] = (
            decode_chat_chunk if dialect == "chat" else decode_text_chunk
        )
        self._accept: Callable[[Any, AnswerState], bool] = (
            _accept_chat if dialect == "chat" else _accept_text
        )
        self._started: Started | None = None
        self._pieces: list[bytes] = []
        self._num_chunks = 0
        self._has_content = False
        self._finished: list[Finished] = []

    def take(self, data: bytes) -> bool:
        """Whether this chunk passes as it is. If not, nothing has changed, and the other lane reads it."""
        try:
            chunk = self._decode(data)
        except ODD:
            return False
        state = self._state
        started = state.started
        if started is not None and not _continues(chunk, started):
            data = _at_the_time_of(started, chunk, data)
            if not data:
                return False
        choice = chunk.choices[0]
        if not self._accept(choice, state):
            return False
        if started is None:
            self._started = state.started = started_of(chunk)
        if b"\n" in data:  # JSON over several data lines: between tokens a blank is the same
            data = data.replace(b"\n", b" ")
        self._pieces += (b"data: ", data, b"\n\n")
        if choice.has_content():
            self._num_chunks += 1
            self._has_content = True
        if choice.finish_reason is not None:
            self._has_content = True
            self._finished.append(Finished(FINISH_REASONS[choice.finish_reason], choice.index))
        return True

    def flush(self, events: list[Event]) -> None:
        if not self._pieces:
            return
        if self._started is not None:
            events.append(self._started)
            self._started = None
        events.append(
            Verbatim(
                b"".join(self._pieces), self._has_content, self._num_chunks, tuple(self._finished)
            )
        )
        self._pieces.clear()
        self._finished.clear()
        self._num_chunks = 0
        self._has_content = False


def _continues(chunk: ChatChunk | TextChunk, started: Started) -> bool:
    """Clients take the chunks of one answer to share these three."""
    return (
        chunk.id == started.id
        and chunk.created == started.created_s
        and chunk.model == started.model
    )


def _at_the_time_of(started: Started, chunk: ChatChunk | TextChunk, data: bytes) -> bytes:
    """llama-server reads the clock for each chunk: the bytes with the first chunk's time; b"" where more differs."""
    if chunk.id != started.id or chunk.model != started.model:
        return b""
    for key in (b'"created":', b'"created": '):
        told = key + str(chunk.created).encode()
        if data.count(told) == 1:
            return data.replace(told, key + str(started.created_s).encode())
    return b""


def _accept_chat(choice: ChatChunkChoice, state: AnswerState) -> bool:
    """Whether this piece may follow what `state` has seen, byte for byte; if so, `state` knows it now."""
    delta = choice.delta
    known = state.choices.get(choice.index)
    finishes = choice.finish_reason is not None
    if known is not None and not (finishes or delta.tool_calls or known.finished):
        return not known.high_surrogate  # a piece of text: nothing to note
    if known is None:
        if delta.role is None:  # a choice begins with its role: the other lane adds it
            return False
    elif known.finished or known.high_surrogate:
        return False
    if delta.tool_calls is not None and not _accept_pieces(delta.tool_calls, known):
        return False
    if (
        finishes
        and known is not None
        and not all(call.announced and call.has_arguments for call in known.calls)
    ):
        return False  # a call still waits for its name, or for the "{}" of no arguments
    known = state.choice(choice.index)
    if delta.tool_calls is not None:
        _note_pieces(delta.tool_calls, known)
    if finishes:
        state.finish(known)
    return True


def _accept_text(choice: TextChunkChoice, state: AnswerState) -> bool:
    known = state.choice(choice.index)
    if known.finished or known.high_surrogate:
        return False
    if choice.finish_reason is not None:
        state.finish(known)
    return True


def _accept_pieces(pieces: list[ToolCallPiece], choice: ChoiceState | None) -> bool:
    """Calls are counted from 0; the first piece of each brings id, type and name, and no other does."""
    num_calls = num_known = 0 if choice is None else len(choice.calls)
    for piece in pieces:
        known = None if choice is None else choice.calls_by_upstream_index.get(piece.index)
        fields = (piece.id, piece.type, piece.name)
        if known is not None or num_known <= piece.index < num_calls:
            goes_on = known is None or (known.announced and known.index == piece.index)
            if not goes_on or any(field is not UNSET for field in fields):
                return False
        elif piece.index != num_calls or any(field is UNSET for field in fields):
            return False
        else:
            num_calls += 1
    return True


def _note_pieces(pieces: list[ToolCallPiece], choice: ChoiceState) -> None:
    for piece in pieces:
        if piece.index == len(choice.calls):
            call = CallState(piece.index, str(piece.id), str(piece.name))
            call.announced = True
            choice.calls.append(call)
            choice.calls_by_upstream_index[piece.index] = call
        if piece.function is UNSET or piece.function.arguments:
            choice.calls[piece.index].has_arguments = True
