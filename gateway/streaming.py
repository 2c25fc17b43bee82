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
    """Which choices of an answer are open and which have ended; nothing may follow an end."""

    __slots__ = ("_ended", "open")

    def __init__(self) -> None:
        self.open: set[int] = set()
        self._ended: set[int] = set()

    def begin(self, choice: int) -> bool:
        """True where the choice is new: its first chunk must be written now."""
        if choice in self.open or choice in self._ended:
            return False
        self.open.add(choice)
        return True

    def end(self, choice: int) -> None:
        self.open.discard(choice)
        self._ended.add(choice)

    @property
    def all_ended(self) -> bool:
        """True once at least one choice has ended and none is open."""
        return bool(self._ended) and not self.open
