"""Server-sent events from bytes, in whatever pieces they come.

The format is that of the WHATWG HTML standard, section 9.2: lines end in LF, CRLF or CR, a blank line ends an event,
a leading BOM is skipped, comments and unknown fields are ignored. Two things differ, on purpose: an event that the end
of the stream cuts off before its blank line is handed out by `finish`, and `id` and `retry` are not kept, for nothing
here reconnects.
"""

from __future__ import annotations

from msgspec import Struct

MAX_EVENT_BYTES = 32 * 1024 * 1024
_BOM = b"\xef\xbb\xbf"


class EventTooLarge(Exception):
    """One event is larger than the parser was allowed to hold; the message names the limit in bytes."""


class SSEEvent(Struct, frozen=True, gc=False):
    """`event` is its type ("message" where none was given); `data` its data lines joined by LF."""

    event: str
    data: bytes


class SSEParser:
    """Bytes in, whole events out; the same events however the bytes are cut.

    Memory is bounded by `max_event_bytes`, and each byte is looked at a fixed number of times: an unfinished event is
    kept as the list of its pieces and joined once.
    """

    __slots__ = ("_last_was_cr", "_max_event_bytes", "_num_pending_bytes", "_pending", "_start")

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max_event_bytes = max_event_bytes
        self._pending: list[bytes] = []  # pieces of the unfinished event, their line ends LF
        self._num_pending_bytes = 0
        self._last_was_cr = False  # a line feed that comes next belongs to that carriage return
        self._start: bytes | None = b""  # what may still become a BOM; None: past it

    def feed(self, data: bytes) -> list[SSEEvent]:
        """Events that are complete with these bytes.

        Raises:
            EventTooLarge: an unfinished event grew beyond the limit.
        """
        if self._start is not None:
            data = self._skip_bom(data)
        if self._last_was_cr and data:
            self._last_was_cr = False
            data = data.removeprefix(b"\n")
        if b"\r" in data:
            self._last_was_cr = data.endswith(b"\r")
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        if not data:
            return []
        if not self._ends_event(data):
            self._keep(data)
            return []
        if self._pending:
            self._pending.append(data)
            data = b"".join(self._pending)
            self._pending.clear()
            self._num_pending_bytes = 0
        return self._split(data)

    def finish(self) -> list[SSEEvent]:
        """The last event, where the stream ended without its blank line."""
        if self._start:
            self._keep(self._start)
        self._start = None
        block = b"".join(self._pending)
        self._pending.clear()
        self._num_pending_bytes = 0
        event = _parse_block(block)
        return [] if event is None else [event]

    def _skip_bom(self, data: bytes) -> bytes:
        assert self._start is not None
        data = self._start + data
        if len(data) < len(_BOM) and _BOM.startswith(data):
            self._start = data
            return b""
        self._start = None
        return data.removeprefix(_BOM)

    def _ends_event(self, data: bytes) -> bool:
        if b"\n\n" in data:
            return True
        return bool(self._pending) and data[0] == 10 and self._pending[-1][-1] == 10

    def _keep(self, piece: bytes) -> None:
        self._pending.append(piece)
        self._num_pending_bytes += len(piece)
        if self._num_pending_bytes > self._max_event_bytes:
            self._pending.clear()
            raise EventTooLarge(
                f"one event of the stream is larger than {self._max_event_bytes} bytes"
            )

    def _split(self, data: bytes) -> list[SSEEvent]:
        blocks = data.split(b"\n\n")
        rest = blocks.pop()
        events: list[SSEEvent] = []
        for block in blocks:
            if block.startswith(b"data: ") and b"\n" not in block:
                events.append(SSEEvent("message", block[6:]))
            elif (event := _parse_block(block)) is not None:
                events.append(event)
        if rest:
            self._keep(rest)
        return events


def _parse_block(block: bytes) -> SSEEvent | None:
    """One event from its lines; None without a data line (comments, `retry:`, a bare `event:`)."""
    kind = "message"
    data: list[bytes] = []
    for line in block.split(b"\n"):
        name, _, value = line.partition(b":")
        if name == b"data":
            data.append(value.removeprefix(b" "))
        elif name == b"event":
            kind = value.removeprefix(b" ").decode("utf-8", "replace") or "message"
    return SSEEvent(kind, b"\n".join(data)) if data else None
