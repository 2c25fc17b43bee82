"""One request and its answer on a server connection: what ASGI calls `receive` and `send`."""

from __future__ import annotations

import asyncio
import http
import logging
from collections.abc import Callable
from typing import Literal, Protocol

from starlette.types import ASGIApp, Message, Scope

Headers = list[tuple[bytes, bytes]]

log = logging.getLogger("tidegate")
ON_DISCONNECT = "tidegate.on_disconnect"
"""ASGI extension: call it with a function, and that is called when the client leaves; with None to take it back."""

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
PAUSE_ABOVE_BYTES = 64 * 1024  # of a body that nobody has read yet
NO_BODY = frozenset({204, 304})
STATUS_LINES = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode()
    for status in http.HTTPStatus
}


class Wire(Protocol):
    """What an exchange asks of its connection."""

    is_writable: bool

    @property
    def default_headers(self) -> Headers: ...

    def write(self, data: bytes) -> None: ...

    async def drain(self) -> None: ...

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def close(self) -> None: ...

    def exchange_done(self, exchange: Exchange) -> None:
        """The answer is out, or never will be."""
        ...


class Exchange:
    """The head of an answer waits for the first bytes of its body: one write, one packet."""

    __slots__ = (
        "_body",
        "_disconnected",
        "_framing",
        "_has_body_end",
        "_head",
        "_is_head_request",
        "_left_bytes",
        "_num_body_bytes",
        "_on_disconnect",
        "_owes_continue",
        "_reader",
        "_wire",
        "complete",
        "keep_alive",
        "scope",
    )

    def __init__(self, wire: Wire, scope: Scope, keep_alive: bool, owes_continue: bool) -> None:
        self.scope = scope
        self.keep_alive = keep_alive
        self.complete = False
        self._wire = wire
        self._owes_continue = owes_continue
        self._is_head_request = scope["method"] == "HEAD"
        self._body: list[bytes] = []
        self._num_body_bytes = 0
        self._has_body_end = False
        self._reader: asyncio.Future[None] | None = None
        self._disconnected = False
        self._on_disconnect: Callable[[], None] | None = None
        self._head: bytes | None = None  # not yet sent; b"" once it is
        self._framing: Literal["length", "chunks", "close"] = "close"  # what tells the body's end
        self._left_bytes = 0  # of an answer by length
        scope["extensions"] = {ON_DISCONNECT: self.on_disconnect}

    # -- For the connection ------------------------------------------------------------------------------------------

    @property
    def has_begun(self) -> bool:
        """Whether bytes of the answer are on their way."""
        return self._head == b""

    def body_arrived(self, data: bytes) -> None:
        if self.complete:  # nobody will read it
            return
        self._body.append(data)
        self._num_body_bytes += len(data)
        if self._num_body_bytes > PAUSE_ABOVE_BYTES:
            self._wire.pause_reading()
        self._wake()

    def body_ended(self) -> None:
        self._has_body_end = True
        self._wake()

    def client_left(self) -> None:
        self._disconnected = True
        self._wake()
        notify, self._on_disconnect = self._on_disconnect, None
        if notify is not None and not self.complete:
            notify()

    async def run(self, app: ASGIApp) -> None:
        """The whole answer. An app that fails, or says too little, ends the connection."""
        try:
            await app(self.scope, self.receive, self.send)
            if not self.complete and not self._disconnected:
                log.error("%s: the answer has no end", self.scope["path"][:200])
                self._fail()
        except asyncio.CancelledError:  # the server stops
            self._fail()
            raise
        except Exception:
            log.exception("%s failed", self.scope["path"][:200])
            self._fail()
        finally:
            if not self.complete:
                self.complete = True
                self._wire.close()
            self._wire.exchange_done(self)

    # -- ASGI --------------------------------------------------------------------------------------------------------

    def on_disconnect(self, notify: Callable[[], None] | None) -> None:
        self._on_disconnect = notify
        if notify is not None and self._disconnected:
            self.client_left()

    async def receive(self) -> Message:
        if self._owes_continue and not self._has_body_end:
            self._owes_continue = False
            self._wire.write(CONTINUE)
        self._wire.resume_reading()
        while not self._body and not self._ends_now():
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        if self._disconnected or self.complete:
            return {"type": "http.disconnect"}
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._body.clear()
        self._num_body_bytes = 0
        if self._has_body_end:
            self._owes_continue = False
            self._has_body_end = (
                False  # told once; what comes after it is the end of the connection
            )
            return {"type": "http.request", "body": body}
        return {"type": "http.request", "body": body, "more_body": True}

    async def send(self, message: Message) -> None:
        if not self._wire.is_writable:
            await self._wire.drain()
        if self._disconnected:
            return
        if message["type"] == "http.response.start" and self._head is None:
            self._start(message["status"], message.get("headers", ()))
        elif (
            message["type"] == "http.response.body" and self._head is not None and not self.complete
        ):
            self._continue(message.get("body", b""), message.get("more_body", False))
        else:
            raise RuntimeError(f"unexpected ASGI message {message['type']!r}")

    # -- Inside ------------------------------------------------------------------------------------------------------

    def _ends_now(self) -> bool:
        return self._has_body_end or self._disconnected or self.complete

    def _wake(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None and not reader.done():
            reader.set_result(None)

    def _start(self, status: int, headers: Headers) -> None:
        self._owes_continue = False
        lines = [STATUS_LINES[status]]
        has_length = says_close = False
        for name, value in (*self._wire.default_headers, *headers):
            lines.append(b"%b: %b\r\n" % (name, value))
            if name == b"content-length":
                has_length = True
                self._left_bytes = int(value)
            elif name == b"connection" and value.lower() == b"close":
                self.keep_alive, says_close = False, True
        has_body = not self._is_head_request and status not in NO_BODY
        if has_length or not has_body:
            self._framing = "length"
        elif self.scope["http_version"] == "1.1":
            self._framing = "chunks"
            lines.append(b"transfer-encoding: chunked\r\n")
        else:
            self.keep_alive = False
        if not has_body:
            self._left_bytes = 0
        if not self.keep_alive and not says_close:
            lines.append(b"connection: close\r\n")
        lines.append(b"\r\n")
        self._head = _checked(b"".join(lines), len(lines))

    def _continue(self, body: bytes, more: bool) -> None:
        if self._is_head_request:
            body = b""
        if self._framing == "length":
            self._left_bytes -= len(body)
            if self._left_bytes < 0 or (self._left_bytes > 0 and not more):
                raise RuntimeError("the answer is not as long as its content-length says")
        head, self._head = self._head, b""
        assert head is not None
        if self._framing == "chunks":
            data = b"%b%x\r\n%b\r\n" % (head, len(body), body) if body else head
            if not more:
                data += b"0\r\n\r\n"
        else:
            data = head + body
        if not more:
            self.complete = True
            self._wake()
        if data:
            self._wire.write(data)

    def _fail(self) -> None:
        """A whole 500 where nothing has been sent; else the connection ends before the answer does."""
        if self.complete or self._disconnected or self.has_begun:
            return
        self._head = None
        self.keep_alive = False
        text = b"Internal Server Error"
        self._start(500, [(b"content-type", b"text/plain"), (b"content-length", b"%d" % len(text))])
        self._continue(text, more=False)


def _checked(head: bytes, num_lines: int) -> bytes:
    """A value with a line break in it would let its author write headers, or a second answer."""
    if head.count(b"\n") != num_lines or head.count(b"\r") != num_lines or b"\0" in head:
        raise RuntimeError("a header of the answer has a line break or a NUL in it")
    return head
