"""One HTTP/1.1 connection: writes a request, parses the answer with httptools, minds the deadline."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Protocol, cast

import httptools

from plugins.errors import UpstreamError, UpstreamUnavailable
from plugins.providers.http_response import Response

MAX_HEADERS = 128
MAX_HEADER_BYTES = 64 * 1024
MAX_FRAMING_BYTES = (
    512 * 1024
)  # read in a row without a byte of body: endless heads, trailers, chunk extensions
JOIN_BELOW_BYTES = 64 * 1024  # one write, one packet; larger bodies are not copied


class ConnectionLost(UpstreamUnavailable):
    """`stale`: the connection had been idle and not one byte of the answer came, so the request may be sent again."""

    stale = False


class Keeper(Protocol):
    """Who a connection goes back to."""

    def keep(self, connection: Connection) -> None: ...

    def forget(self, connection: Connection) -> None: ...


class Connection(asyncio.Protocol):
    __slots__ = (
        "_ends_at_eof",
        "_finished",
        "_headers",
        "_keeper",
        "_loop",
        "_name",
        "_num_framing_bytes",
        "_num_header_bytes",
        "_parser",
        "_reusable",
        "_reused",
        "_timer",
        "_timer_at_s",
        "_transport",
        "response",
    )

    def __init__(self, keeper: Keeper, loop: asyncio.AbstractEventLoop, name: str) -> None:
        self.response: Response | None = None
        self._keeper = keeper
        self._loop = loop
        self._name = name
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._headers: dict[bytes, bytes] = {}
        self._num_header_bytes = 0
        self._num_framing_bytes = 0
        self._ends_at_eof = False  # the answer's length is told by the end of the connection
        self._finished = False
        self._reused = False
        self._reusable = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at_s = 0.0

    def send(self, response: Response, head: bytes, body: bytes) -> None:
        """Write one request; its answer goes to `response`."""
        assert self._transport is not None
        assert self.response is None
        self.response = response
        self._num_framing_bytes = 0
        self._num_header_bytes = 0
        self._ends_at_eof = False
        if len(body) < JOIN_BELOW_BYTES:
            self._transport.write(head + body)
        else:
            self._transport.write(head)
            self._transport.write(body)
        self.expect(response.deadline_s(self._loop.time()))

    @property
    def usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    # -- Wire: what the response asks for ----------------------------------------------------------------------------

    def pause(self) -> None:
        if self._transport is not None:
            self._transport.pause_reading()

    def resume(self) -> None:
        if self.usable:
            assert self._transport is not None
            self._transport.resume_reading()

    def abort(self) -> None:
        self.response = None
        if self._transport is not None:
            self._transport.abort()

    def lose(self) -> None:
        """The client is being closed."""
        self._fail(UpstreamUnavailable(f"provider {self._name}: is being closed"))

    def expect(self, when_s: float) -> None:
        """One timer per connection, moved only when it would ring too late; it survives from request to request."""
        if self._timer is not None:
            if self._timer_at_s <= when_s:
                return
            self._timer.cancel()
        self._timer_at_s = when_s
        self._timer = self._loop.call_at(when_s, self._ring)

    def _ring(self) -> None:
        self._timer = None
        response = self.response
        if response is None:
            return
        now_s = self._loop.time()
        when_s = response.deadline_s(now_s)
        if when_s > now_s:
            self.expect(when_s)
        else:
            self._fail(response.timeout_error(now_s))

    def _fail(self, error: UpstreamError) -> None:
        response = self.response
        self.abort()
        if response is not None:
            response.on_error(error)

    # -- asyncio.Protocol --------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are not subclasses
        with contextlib.suppress(OSError, AttributeError):
            transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        if self.response is None:  # nobody asked: a server's farewell on an idle connection
            self.abort()
            return
        self._num_framing_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            if not self._finished:
                self._fail(
                    UpstreamUnavailable(f"provider {self._name}: its answer is not HTTP/1.1")
                )
                return
            self._reusable = False
        if self._finished:
            self._finish()
        elif self._num_framing_bytes > MAX_FRAMING_BYTES:
            self._refuse_head()

    def connection_lost(self, exc: Exception | None) -> None:
        response, self.response = self.response, None
        self._transport = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._keeper.forget(self)
        if response is None:
            return
        if self._ends_at_eof and exc is None:
            response.on_end()
            return
        response.on_error(self._lost(response))

    def _lost(self, response: Response) -> ConnectionLost:
        if response.status:
            return ConnectionLost(
                f"provider {self._name}: the connection broke in the middle of the answer"
            )
        error = ConnectionLost(f"provider {self._name}: closed the connection without an answer")
        error.stale = self._reused and self._num_framing_bytes == 0
        return error

    # -- httptools ---------------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._finished:  # a second answer to one request: this connection is not to be trusted
            raise ValueError
        self._headers = {}

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_header_bytes += len(name) + len(value)
        name = name.lower()
        if name in self._headers:
            value = self._headers[name] + b", " + value
        self._headers[name] = value

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        response = self.response
        if (
            status < 200 or response is None
        ):  # 100 Continue and its like: the answer is still to come
            return
        headers = self._headers
        if len(headers) > MAX_HEADERS or self._num_header_bytes > MAX_HEADER_BYTES:
            self._refuse_head()
            return
        coding = headers.get(b"transfer-encoding")
        if coding is not None:
            self._ends_at_eof = not coding.lower().endswith(b"chunked")
        else:
            self._ends_at_eof = b"content-length" not in headers and status not in (204, 304)
        response.on_head(status, headers)

    def on_body(self, data: bytes) -> None:
        self._num_framing_bytes = 1
        if self.response is not None:
            self.response.on_body(data)

    def on_message_complete(self) -> None:
        if self.response is not None and self.response.status:
            self._finished = True
            self._reusable = self._parser.should_keep_alive()  # no longer known after the call

    # -- Ends --------------------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        """The answer is whole: hand the connection back, unless either side is done with it."""
        response, self.response = self.response, None
        self._finished = False
        transport = self._transport
        if response is None or transport is None:
            return
        keep = self._reusable and transport.get_write_buffer_size() == 0
        paused = response.paused
        response.on_end()
        if keep and self.usable:
            if paused:
                transport.resume_reading()
            self._reused = True
            self._keeper.keep(self)
        else:
            transport.abort()  # nothing is left to say, and an early answer may have left a body unsent

    def _refuse_head(self) -> None:
        self._fail(
            UpstreamUnavailable(
                f"provider {self._name}: its answer has more than {MAX_HEADERS} headers "
                f"or {MAX_HEADER_BYTES} bytes of them"
            )
        )
