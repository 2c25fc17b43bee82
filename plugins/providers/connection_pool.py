"""Idle connections to one origin, newest first, and those in use, so that all can be closed."""

from __future__ import annotations

import asyncio

from plugins.providers.http_connection import Connection

IDLE_EXPIRY_S = 55.0  # below the 60 s after which common load balancers drop a connection silently
MAX_IDLE = 1024


class ConnectionPool:
    __slots__ = ("_active", "_closed", "_idle", "_idle_expiry_s", "_loop", "_max_idle", "_sweeper")

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        idle_expiry_s: float = IDLE_EXPIRY_S,
        max_idle: int = MAX_IDLE,
    ) -> None:
        self._loop = loop
        self._idle_expiry_s = idle_expiry_s
        self._max_idle = max_idle
        self._idle: dict[Connection, float] = {}  # to the time when it became idle, oldest first
        self._active: set[Connection] = set()
        self._sweeper: asyncio.TimerHandle | None = None
        self._closed = False

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    @property
    def num_active(self) -> int:
        return len(self._active)

    def take(self) -> Connection | None:
        """The connection used last, so that the others may expire; None: open a new one."""
        now_s = self._loop.time()
        while self._idle:
            connection, since_s = self._idle.popitem()
            if connection.usable and now_s - since_s < self._idle_expiry_s:
                self._active.add(connection)
                return connection
            connection.abort()
        return None

    def add(self, connection: Connection) -> None:
        """A new connection that is about to be used."""
        self._active.add(connection)

    def keep(self, connection: Connection) -> None:
        """Its answer was read to the end; it may serve the next request."""
        self._active.discard(connection)
        if self._closed or len(self._idle) >= self._max_idle:
            connection.abort()
            return
        self._idle[connection] = self._loop.time()
        if self._sweeper is None:
            self._sweeper = self._loop.call_later(self._idle_expiry_s, self._sweep)

    def forget(self, connection: Connection) -> None:
        """It is gone."""
        self._active.discard(connection)
        self._idle.pop(connection, None)

    def close(self) -> None:
        """Abort everything, answers in flight included; connections that come back later are closed too."""
        self._closed = True
        if self._sweeper is not None:
            self._sweeper.cancel()
        for connection in [*self._idle, *self._active]:
            connection.lose()

    def _sweep(self) -> None:
        self._sweeper = None
        before_s = self._loop.time() - self._idle_expiry_s
        for connection, since_s in list(self._idle.items()):
            if since_s > before_s:
                self._sweeper = self._loop.call_at(since_s + self._idle_expiry_s, self._sweep)
                return
            del self._idle[connection]
            connection.abort()
