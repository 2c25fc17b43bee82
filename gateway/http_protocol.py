"""The server's side of one HTTP/1.1 connection (RFC 9112), run by uvicorn's server, with limits on slow clients.

uvicorn's own class takes twice the time for a request and sets no such limits: connections that never finish a
request, or never read their answer, would stay for ever and with them the places that their streams hold.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from typing import Any, Literal, cast
from urllib.parse import unquote_to_bytes

import httptools
import uvicorn
from starlette.types import ASGIApp, Scope
from uvicorn.server import ServerState

from gateway.errors import openai_error_body
from gateway.http_exchange import STATUS_LINES, Exchange, Headers
from plugins.errors import InvalidRequest

log = logging.getLogger("tidegate")
MAX_HEAD_BYTES = 64 * 1024  # of request line and headers, give or take one read
HEAD_S = 20.0  # from a connection's first moment, or a head's first byte, to the end of the head
BODY_GAP_S = 60.0  # between two pieces of a body
LINGER_S = 5.0  # for a body that goes on after its answer: then nobody will read it
READ_STALL_S = 60.0  # for a client to take what waits for it
HEAD_END = b"\r\n\r\n"


class ServerConnection(asyncio.Protocol):
    """Given to uvicorn as its `http` class. Requests of one connection are answered one after another."""

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        if not config.loaded:
            config.load()
        self.is_writable = True
        self._app = cast(ASGIApp, config.loaded_app)  # pyright: ignore[reportUnknownMemberType]
        self._loop = asyncio.get_running_loop() if _loop is None else _loop
        self._server = server_state
        self._app_state = app_state
        self._keep_alive_s = config.timeout_keep_alive
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport
        self._addresses: tuple[tuple[str, int] | None, tuple[str, int] | None] = (None, None)
        # What is being received
        self._phase: Literal["idle", "head", "body"] = "idle"
        self._num_head_bytes = 0
        self._url = b""
        self._headers: Headers = []
        self._expects_continue = False
        self._incoming: Exchange | None = None
        # What is being answered
        self._current: Exchange | None = None
        self._waiting: deque[Exchange] = deque()
        # Limits
        self._is_reading = True
        self._drained: asyncio.Future[None] | None = None
        self._due_s = math.inf  # when the client is late
        self._timer: asyncio.TimerHandle | None = None  # rings no later than that
        self._timer_at_s = 0.0
        self._stall: asyncio.TimerHandle | None = None

    # -- asyncio.Protocol --------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are not subclasses
        self._addresses = (
            _address(transport.get_extra_info("sockname")),
            _address(transport.get_extra_info("peername")),
        )
        self._server.connections.add(cast(Any, self))
        self._expect(HEAD_S)

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.connections.discard(cast(Any, self))
        for timer in (self._timer, self._stall):
            if timer is not None:
                timer.cancel()
        self._timer = self._stall = None
        self._due_s = math.inf
        self.is_writable = True
        self._let_write()
        self._waiting.clear()
        if self._current is not None:
            self._current.client_left()
        self._transport.close()

    def data_received(self, data: bytes) -> None:
        if self._phase == "idle":
            data = without_upgrade(data)
        elif self._phase == "head":
            self._num_head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._refuse(400, "What was received is not an HTTP/1.1 request.")
            return
        if self._phase == "head":
            if self._num_head_bytes > MAX_HEAD_BYTES:
                text = f"The request line and headers are larger than {MAX_HEAD_BYTES} bytes."
                self._refuse(431, text)
            self._set_timer()
        elif self._phase == "body":
            self._expect(LINGER_S if self._is_answered_early else BODY_GAP_S)

    def pause_writing(self) -> None:
        self.is_writable = False
        if self._stall is None:
            self._stall = self._loop.call_later(READ_STALL_S, self._transport.abort)

    def resume_writing(self) -> None:
        self.is_writable = True
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None
        self._let_write()

    # -- httptools ---------------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._phase = "head"
        self._num_head_bytes = 0
        self._url = b""
        self._headers = []
        self._expects_continue = False
        self._due_s = self._loop.time() + HEAD_S

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self._expects_continue = True
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        self._phase = "body"
        version = self._parser.get_http_version()
        keep_alive = version == "1.1" and self._parser.should_keep_alive()
        exchange = Exchange(self, self._scope(version), keep_alive, self._expects_continue)
        self._incoming = exchange
        if self._current is None:
            self._answer(exchange)
        else:  # the client did not wait for the answer before
            self._waiting.append(exchange)
            self.pause_reading()

    def on_body(self, data: bytes) -> None:
        if self._incoming is not None:
            self._incoming.body_arrived(data)

    def on_message_complete(self) -> None:
        self._phase = "idle"
        exchange, self._incoming = self._incoming, None
        if exchange is not None:
            exchange.body_ended()
        self._due_s = math.inf if self._current is not None else self._rests_until_s()

    # -- Wire: what the exchange asks for ----------------------------------------------------------------------------

    @property
    def default_headers(self) -> Headers:
        return self._server.default_headers

    def write(self, data: bytes) -> None:
        self._transport.write(data)

    async def drain(self) -> None:
        while not self.is_writable:
            if self._drained is None or self._drained.done():
                self._drained = self._loop.create_future()
            await self._drained

    def pause_reading(self) -> None:
        if self._is_reading and not self._transport.is_closing():
            self._is_reading = False
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if not (self._is_reading or self._waiting or self._transport.is_closing()):
            self._is_reading = True
            self._transport.resume_reading()

    def close(self) -> None:
        self._transport.close()

    def exchange_done(self, exchange: Exchange) -> None:
        self._current = None
        if not exchange.keep_alive:
            self._transport.close()
        if self._transport.is_closing():
            return
        if self._waiting:
            self._answer(self._waiting.popleft())
        self.resume_reading()
        if self._is_answered_early:
            self._expect(LINGER_S)
        elif self._phase == "idle" and self._current is None:
            self._due_s = self._rests_until_s()
            self._set_timer()

    # -- For the server ----------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Take no more requests; the one that is being answered may end."""
        if self._current is None:
            self._transport.close()
            return
        for exchange in (self._current, *self._waiting):
            exchange.keep_alive = False

    # -- Inside ------------------------------------------------------------------------------------------------------

    def _scope(self, version: str) -> Scope:
        path, _, query = self._url.partition(b"?")
        if not path.startswith(b"/"):  # a whole URL, as a proxy is asked
            url = httptools.parse_url(self._url)
            path, query = url.path or b"/", url.query or b""
        server, client = self._addresses
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": version,
            "server": server,
            "client": client,
            "scheme": "http",
            "method": self._parser.get_method().decode("ascii"),
            "root_path": "",
            "path": (unquote_to_bytes(path) if b"%" in path else path).decode("utf-8", "replace"),
            "raw_path": path,
            "query_string": query,
            "headers": self._headers,
            "state": self._app_state.copy(),
        }

    def _answer(self, exchange: Exchange) -> None:
        self._current = exchange
        task = self._loop.create_task(exchange.run(self._app))
        self._server.tasks.add(task)
        task.add_done_callback(self._server.tasks.discard)

    def _let_write(self) -> None:
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    def _refuse(self, status: int, text: str) -> None:
        """Say why and hang up; whole requests that came before get their answers first."""
        self._phase = "idle"
        broken, self._incoming = self._incoming, None
        if self._current is not None and self._current is not broken:
            if broken is not None:
                self._waiting.remove(broken)
            last = self._waiting[-1] if self._waiting else self._current
            last.keep_alive = False
            return
        if broken is not None and broken.has_begun:
            self._transport.close()
            return
        body = openai_error_body(InvalidRequest(text))
        head = (
            b"%bcontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        )
        self._transport.write(head % (STATUS_LINES[status], len(body)) + body)
        self._transport.close()

    # -- The client's time -------------------------------------------------------------------------------------------

    @property
    def _is_answered_early(self) -> bool:
        """Whether the body that is coming in belongs to a request that was refused before it was read."""
        return self._phase == "body" and self._incoming is not None and self._incoming.complete

    def _rests_until_s(self) -> float:
        return self._loop.time() + self._keep_alive_s

    def _expect(self, within_s: float) -> None:
        self._due_s = self._loop.time() + within_s
        self._set_timer()

    def _set_timer(self) -> None:
        """One timer, set anew only when it would ring too late: a request that comes in one piece sets none."""
        if self._timer is not None:
            if self._timer_at_s <= self._due_s:
                return
            self._timer.cancel()
        self._timer_at_s = self._due_s
        self._timer = self._loop.call_at(self._due_s, self._ring)

    def _ring(self) -> None:
        self._timer = None
        if self._due_s == math.inf:
            return
        if self._phase == "body" and not self._is_reading:  # it is we who do not read
            self._expect(BODY_GAP_S)
        elif self._due_s > self._loop.time():
            self._set_timer()
        else:
            self._transport.close()


def _address(name: tuple[str, int] | str | None) -> tuple[str, int] | None:
    return (name[0], name[1]) if isinstance(name, tuple) else None  # a Unix socket has none


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
