"""The gateway's side of the socket: one connection to one worker, kept alive, shared by all its streams."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import cast

import msgspec

from backend.protocol import (
    VERSION,
    Abort,
    Accepted,
    Delta,
    Deltas,
    FrameReader,
    Generate,
    Hello,
    ProtocolError,
    Ready,
    Rejected,
    Stats,
    decode_to_gateway,
    encode_frame,
)
from plugins.errors import PayloadTooLarge, UpstreamUnavailable

RETRY_FIRST_S = 0.02
RETRY_MAX_S = 0.5
logger = logging.getLogger(__name__)
Reply = Accepted | Rejected | Delta


class Mailbox:
    """What the worker said about one request and nobody has read yet."""

    def __init__(self, request_id: int, cost_tokens: int) -> None:
        self.request_id = request_id
        self.cost_tokens = cost_tokens  # of the work asked for, as far as it can be known
        self.lost = False
        self._replies: list[Reply] = []
        self._waiter: asyncio.Future[None] | None = None

    def put(self, reply: Reply) -> None:
        self._replies.append(reply)
        self._wake()

    def lose(self) -> None:
        self.lost = True
        self._wake()

    async def get(self, deadline_s: float) -> list[Reply]:
        """All replies since the last call; waits for the first. [] when the connection is gone.

        Raises TimeoutError at `deadline_s`, on the loop's clock.
        """
        if not self._replies and not self.lost:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                async with asyncio.timeout_at(deadline_s):
                    await self._waiter
            finally:
                self._waiter = None
        replies, self._replies = self._replies, []
        return replies

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Replica:
    """One worker, connected to again whenever it comes back. `ready`: what it says of itself, None while it is away."""

    def __init__(self, name: str, socket_path: Path) -> None:
        self.name = name
        self.ready: Ready | None = None
        self.stats: Stats | None = None
        self.outstanding_tokens = 0
        self._socket_path = socket_path
        self._link: _Link | None = None
        self._mailboxes: dict[int, Mailbox] = {}
        self._next_id = 1

    async def run(self) -> None:
        """Connect, stay, connect again. Ends by cancellation only."""
        loop, retry_s = asyncio.get_running_loop(), RETRY_FIRST_S
        while True:
            with suppress(OSError):
                link = _Link(self._receive)
                await loop.create_unix_connection(lambda link=link: link, str(self._socket_path))
                self._link = link
                link.send(Hello())
                try:
                    await link.closed
                finally:
                    retry_s = RETRY_FIRST_S if self.ready is not None else retry_s
                    link.close()
                    self._lose_all()
            await asyncio.sleep(retry_s)
            retry_s = min(2 * retry_s, RETRY_MAX_S)

    def open(self, generate: Generate, cost_tokens: int) -> Mailbox:
        """Send a request; its id is set here. Close the mailbox on every way out.

        Raises UpstreamUnavailable (nothing was sent) or PayloadTooLarge.
        """
        if self.ready is None or self._link is None:
            raise UpstreamUnavailable(f"the engine {self.name} is not running", status=503)
        generate.request_id, self._next_id = self._next_id, self._next_id + 1
        try:
            self._link.send(generate)
        except ProtocolError as exc:
            raise PayloadTooLarge(f"the request is too large for the engine: {exc}") from exc
        mailbox = Mailbox(generate.request_id, cost_tokens)
        self._mailboxes[mailbox.request_id] = mailbox
        self.outstanding_tokens += cost_tokens
        return mailbox

    def close(self, mailbox: Mailbox, *, abort: bool) -> None:
        """Synchronous, so that it holds on cancellation too. `abort`: the worker has not ended it by itself."""
        if self._mailboxes.pop(mailbox.request_id, None) is None:
            return
        self.outstanding_tokens -= mailbox.cost_tokens
        if abort and self._link is not None:
            self._link.send(Abort(mailbox.request_id))

    def _receive(self, message: Ready | Accepted | Rejected | Deltas | Stats) -> None:
        if isinstance(message, Deltas):
            for delta in message.items:
                self._deliver(delta)
        elif isinstance(message, Stats):
            self.stats = message
        elif isinstance(message, Ready):
            if message.version != VERSION:
                raise ProtocolError(f"protocol version {message.version}; ours is {VERSION}")
            self.ready = message
        else:
            self._deliver(message)

    def _deliver(self, reply: Reply) -> None:
        mailbox = self._mailboxes.get(reply.request_id)
        if mailbox is not None:  # else it was closed while this was under way
            mailbox.put(reply)

    def _lose_all(self) -> None:
        self._link = self.ready = self.stats = None
        for mailbox in list(self._mailboxes.values()):
            mailbox.lose()


class _Link(asyncio.Protocol):
    """One connected socket; `closed` resolves when it is gone."""

    def __init__(
        self, receive: Callable[[Ready | Accepted | Rejected | Deltas | Stats], None]
    ) -> None:
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._receive = receive
        self._frames = FrameReader()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are not subclasses

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if not self.closed.done():
            self.closed.set_result(None)

    def data_received(self, data: bytes) -> None:
        try:
            for payload in self._frames.feed(data):
                self._receive(decode_to_gateway(payload))
        except ProtocolError as exc:
            logger.error("the connection to an engine is closed: %s", exc)
            self.close()

    def send(self, message: msgspec.Struct) -> None:
        if self._transport is not None:
            self._transport.write(encode_frame(message))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()
