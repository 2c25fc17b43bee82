"""The reader's side of one HTTP answer: its head, its body in pieces, and the deadlines that hold for it."""

from __future__ import annotations

import asyncio
from typing import Protocol

from plugins.errors import UpstreamError, UpstreamTimeout, UpstreamUnavailable
from plugins.interfaces import Timeout
from plugins.providers.content_encoding import BrokenEncoding, Inflater

PAUSE_ABOVE_BYTES = 256 * 1024
DISCARD_S = 1.0
DISCARD_BYTES = 64 * 1024


class Wire(Protocol):
    """What a response asks of the connection that it is read from."""

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def expect(self, when_s: float) -> None:
        """Look at the response's deadline no later than `when_s` of the loop's clock."""
        ...

    def abort(self) -> None: ...


class Response:
    """One answer. Read it with `next` or `read`, and always `close` it: that aborts what was not read to the end."""

    __slots__ = (
        "_chunks",
        "_complete",
        "_discarded",
        "_error",
        "_first_byte_s",
        "_has_progress",
        "_idle_s",
        "_inflater",
        "_loop",
        "_name",
        "_num_queued_bytes",
        "_progress_at_s",
        "_started_at_s",
        "_timeout",
        "_waiter",
        "_wire",
        "headers",
        "paused",
        "status",
    )

    def __init__(
        self,
        wire: Wire,
        loop: asyncio.AbstractEventLoop,
        name: str,
        timeout: Timeout,
        first_byte_s: float,
    ) -> None:
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self._wire = wire
        self._loop = loop
        self._name = name
        self._timeout = timeout
        self._first_byte_s = first_byte_s
        self._idle_s = timeout.idle_s
        self._started_at_s = loop.time()
        self._progress_at_s = 0.0
        self._has_progress = False
        self._chunks: list[bytes] = []
        self._num_queued_bytes = 0
        self.paused = False
        self._complete = False
        self._discarded: int | None = None  # bytes thrown away since `discard`
        self._error: UpstreamError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._inflater: Inflater | None = None

    # -- For the reader ----------------------------------------------------------------------------------------------

    async def head(self) -> None:
        """Until status and headers are there. Raises UpstreamUnavailable or UpstreamTimeout."""
        while not self.status:
            if self._error is not None:
                raise self._error
            await self._wait()
        encoding = self.headers.get(b"content-encoding", b"identity").strip().lower()
        if encoding in (b"gzip", b"x-gzip", b"deflate"):
            self._inflater = Inflater()
        elif encoding not in (b"identity", b""):
            raise UpstreamUnavailable(
                f"provider {self._name}: its answer has a content-encoding that nobody asked for"
            )

    async def next(self) -> bytes:
        """What has come since the last call, at least one byte; b"" at the end of the body.

        Raises:
            UpstreamUnavailable: the connection broke before the end, or the bytes make no sense.
            UpstreamTimeout: a deadline passed.
        """
        if self._inflater is not None:
            return await self._next_inflated(self._inflater)
        while not self._chunks:
            if self._error is not None:
                raise self._error
            if self._complete:
                return b""
            await self._wait()
        return self._take()

    async def read(self, limit: int) -> bytes:
        """The rest of the body. Raises UpstreamUnavailable also when it is longer than `limit` bytes."""
        pieces: list[bytes] = []
        num_bytes = 0
        while piece := await self.next():
            pieces.append(piece)
            num_bytes += len(piece)
            if num_bytes > limit:
                raise UpstreamUnavailable(
                    f"provider {self._name}: its answer is larger than {limit} bytes"
                )
            self.progressed()
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def progressed(self) -> None:
        """The reader got on: the gap between events is measured from here. Bytes alone (keep-alives) do not count."""
        self._progress_at_s = self._loop.time()
        if not self._has_progress:
            self._has_progress = True
            if not self._complete:
                self._wire.expect(self._progress_at_s + self._idle_s)

    def expect_end(self, within_s: float) -> None:
        """Nothing that matters is missing any more: wait for the end no longer than this."""
        self._idle_s = min(self._idle_s, within_s)
        self._has_progress = False
        self.progressed()

    def discard(self) -> None:
        """The rest is of no interest: let the connection go back to the pool if the end comes at once."""
        if self._discarded is None and not self._complete and self._error is None:
            self._discarded = 0
            self._chunks.clear()
            self._resume()
            self._progress_at_s = self._loop.time() + DISCARD_S
            self._wire.expect(self._progress_at_s)

    def close(self) -> None:
        """Abort the connection unless the answer is complete or being discarded. Safe to call again."""
        if not self._complete and self._discarded is None:
            self._complete = True
            self._wire.abort()

    # -- For the connection ------------------------------------------------------------------------------------------

    def on_head(self, status: int, headers: dict[bytes, bytes]) -> None:
        self.headers = headers
        self.status = status
        self._wake()

    def on_body(self, data: bytes) -> None:
        if self._discarded is not None:
            self._discarded += len(data)
            if self._discarded > DISCARD_BYTES:
                self._wire.abort()
            return
        self._chunks.append(data)
        self._num_queued_bytes += len(data)
        if self._num_queued_bytes > PAUSE_ABOVE_BYTES and not self.paused:
            self.paused = True
            self._wire.pause()
        self._wake()

    def on_end(self) -> None:
        self._complete = True
        self.paused = False
        self._wake()

    def on_error(self, error: UpstreamError) -> None:
        if not self._complete and self._error is None:
            self._error = error
            self._wake()

    def deadline_s(self, now_s: float) -> float:
        """When this answer is late. A reader that is busy elsewhere is not the upstream's fault."""
        if self._discarded is not None:
            return self._progress_at_s
        if self._waiter is None and self.status:
            when_s = now_s + self._idle_s
        elif self._has_progress:
            when_s = self._progress_at_s + self._idle_s
        else:
            when_s = self._started_at_s + self._first_byte_s
        return min(when_s, self._started_at_s + self._timeout.total_s)

    def timeout_error(self, now_s: float) -> UpstreamTimeout:
        if now_s >= self._started_at_s + self._timeout.total_s:
            what = f"the answer took longer than {self._timeout.total_s:g} s"
        elif self._has_progress:
            what = f"nothing more came for {self._idle_s:g} s"
        else:
            what = f"no answer began within {self._first_byte_s:g} s"
        return UpstreamTimeout(f"provider {self._name}: {what}")

    # -- Inside ------------------------------------------------------------------------------------------------------

    async def _wait(self) -> None:
        waiter = self._waiter = self._loop.create_future()
        try:
            await waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _take(self) -> bytes:
        chunks = self._chunks
        data = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        chunks.clear()
        self._num_queued_bytes = 0
        if self.paused:
            self._resume()
        return data

    def _resume(self) -> None:
        self._num_queued_bytes = 0
        if self.paused:
            self.paused = False
            self._wire.resume()

    async def _next_inflated(self, inflater: Inflater) -> bytes:
        try:
            while not (data := inflater.pull()):
                while not self._chunks:
                    if self._error is not None:
                        raise self._error
                    if self._complete:
                        if not inflater.complete:
                            raise BrokenEncoding("compressed bytes that end too early")
                        return b""
                    await self._wait()
                inflater.push(self._take())
        except BrokenEncoding as exc:
            raise UpstreamUnavailable(f"provider {self._name}: {exc}") from exc
        return data
