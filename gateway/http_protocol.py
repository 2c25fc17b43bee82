"""The server's side of one connection, with what uvicorn leaves out: limits on a client that sends or reads too slowly.

Without them, connections that never finish a request, or never read their answer, stay for ever and with them the
places at a provider that their streams hold.
"""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 * 1024  # of request line and headers, give or take one read
HEAD_S = 20.0  # from a connection's first moment, or a head's first byte, to the end of the head
BODY_GAP_S = 60.0  # between two pieces of a body
LINGER_S = 5.0  # for a body that goes on after its answer: then nobody will read it
READ_STALL_S = 60.0  # for a client to take what waits for it
HEAD_END = b"\r\n\r\n"


class GuardedProtocol(HttpToolsProtocol):
    """Given to uvicorn as its `http` class. A request that comes in one piece sets no timer."""

    def __init__(self, *args: Any, **fields: Any) -> None:
        super().__init__(*args, **fields)
        self._phase: Literal["idle", "head", "body"] = "idle"  # of what is being received
        self._spoke = False
        self._num_head_bytes = 0
        self._since_s = 0.0  # of the connection, the head's first byte, or the body's last piece
        self._watch: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._look_in(HEAD_S)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for timer in (self._watch, self._stall):
            if timer is not None:
                timer.cancel()

    def data_received(self, data: bytes) -> None:
        if self._phase == "idle":
            data = without_upgrade(data)
        elif self._phase == "head":
            self._num_head_bytes += len(data)
        super().data_received(data)
        if self._phase == "idle":
            return
        if self._phase == "body":
            self._since_s = self.loop.time()
        elif self._num_head_bytes > MAX_HEAD_BYTES:
            self._refuse_head()
        if self._watch is None:
            self._look_in(HEAD_S if self._phase == "head" else BODY_GAP_S)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._spoke = True
        self._phase = "head"
        self._num_head_bytes = 0
        self._since_s = self.loop.time()

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._phase = "body"

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._phase = "idle"

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._answered_early:
            self._look_in(LINGER_S)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._stall is None:
            self._stall = self.loop.call_later(READ_STALL_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def _unsupported_upgrade_warning(self) -> None:
        """Clients may ask for WebSockets at will; it is no fault of ours to log."""

    @property
    def _answered_early(self) -> bool:
        """Whether the body that is coming in belongs to a request that was refused before it was read."""
        return self._phase == "body" and self.cycle.response_complete

    def _look_in(self, delay_s: float) -> None:
        if self._watch is not None:
            self._watch.cancel()
        self._watch = self.loop.call_later(delay_s, self._look)

    def _look(self) -> None:
        self._watch = None
        if self._phase == "idle":
            if not self._spoke:  # connected, and never said a word
                self.transport.close()
            return
        if self._phase == "body" and self.flow.read_paused:  # it is we who do not read
            self._look_in(BODY_GAP_S)
            return
        limit_s = HEAD_S if self._phase == "head" else BODY_GAP_S
        left_s = self._since_s + limit_s - self.loop.time()
        if self._answered_early or left_s <= 0:
            self.transport.close()
        else:
            self._look_in(left_s)

    def _refuse_head(self) -> None:
        text = f"The request line and headers are larger than {MAX_HEAD_BYTES} bytes."
        lines = (
            "HTTP/1.1 431 Request Header Fields Too Large",
            "content-type: text/plain; charset=utf-8",
            f"content-length: {len(text)}",
            "connection: close",
        )
        self.transport.write("\r\n".join((*lines, "", text)).encode())
        self.transport.close()


def without_upgrade(data: bytes) -> bytes:
    """Take an offer to upgrade out of a head that came whole: accepting none is what RFC 9110, 7.8, allows.

    The parser would take the body for another protocol's bytes, and Java's own client offers h2c with every request.
    """
    end = data.find(HEAD_END)
    if end < 0 or data.find(b"pgrade:", 0, end) < 0:
        return data
    lines = data[:end].split(b"\r\n")
    kept = [line for line in lines if line[:8].lower() != b"upgrade:"]
    return b"\r\n".join(kept) + data[end:]
