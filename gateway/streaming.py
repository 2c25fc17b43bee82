"""Server-sent events as the OpenAI-shaped dialects write them, and the bookkeeping that every stream encoder shares.

Grammar of one stream: for each choice a first chunk, content chunks, one finish chunk; choices may interleave; then the
usage chunk if the client asked for it; then `[DONE]`. An error event may take the place of everything that is left.
"""

from __future__ import annotations

import msgspec

CONTENT_TYPE = "text/event-stream; charset=utf-8"
STREAM_HEADERS: tuple[tuple[bytes, bytes], ...] = (
    (b"content-type", CONTENT_TYPE.encode()),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold chunks back
)
KEEP_ALIVE = b": keep-alive\n\n"
"""A comment: every client skips it, and proxies see that the connection lives."""
DONE = b"data: [DONE]\n\n"

_encoder = msgspec.json.Encoder()


def write_event(buffer: bytearray, payload: object, event: str | None = None) -> None:
    """Append one event. JSON text holds no line feed, so it always fits one `data:` line."""
    if event is not None:
        buffer += b"event: " + event.encode() + b"\n"
    buffer += b"data: "
    _encoder.encode_into(payload, buffer, -1)
    buffer += b"\n\n"


class Choices:
    """Which choices of an answer have begun and which have ended; nothing may follow an end."""

    __slots__ = ("_begun", "_ended")

    def __init__(self) -> None:
        self._begun: set[int] = set()
        self._ended: set[int] = set()

    def begin(self, choice: int) -> bool:
        """True for the first event of a choice: its first chunk must be written now."""
        if choice in self._begun:
            return False
        self._begun.add(choice)
        return True

    def end(self, choice: int) -> bool:
        """False where the choice has ended before."""
        if choice in self._ended:
            return False
        self._begun.add(choice)
        self._ended.add(choice)
        return True

    def has_ended(self, choice: int) -> bool:
        return choice in self._ended

    @property
    def all_ended(self) -> bool:
        """True once at least one choice began and every one that began has ended."""
        return bool(self._begun) and self._begun == self._ended
