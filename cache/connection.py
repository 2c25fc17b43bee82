"""One connection to the store, on redis-py: that knows URLs, TLS, logins and the protocol. Deadlines are the caller's.

We take redis-py's `Connection`, not its client: a batch of commands costs half the CPU without pools and response
callbacks (64 GETs: 6 us each instead of 16), and nothing is retried behind our back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol, cast

import redis.asyncio as redis_asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError

from plugins.errors import StoreUnavailable

Encodable = str | bytes | int | float
Command = tuple[Encodable, ...]
CONNECTION_ERRORS = (RedisError, OSError)


class _RedisConnection(Protocol):
    """What we use of `redis.asyncio.Connection` (its own types are partial)."""

    @property
    def is_connected(self) -> bool: ...
    async def connect(self) -> None: ...
    async def disconnect(self, nowait: bool = False) -> None: ...
    async def can_read(self) -> bool: ...
    def pack_commands(self, commands: Sequence[Command]) -> list[bytes]: ...
    async def send_packed_command(self, command: list[bytes], check_health: bool) -> None: ...
    async def read_response(self) -> Any: ...


class Connection:
    """Opened by the first exchange, and anew after a failure. Not for two tasks at once."""

    def __init__(self, url: str) -> None:
        """Raises StoreUnavailable where `url` is not one; its text is not repeated, for it may hold a password."""
        try:
            pool = cast(Any, redis_asyncio.ConnectionPool).from_url(
                url,
                protocol=2,
                retry=Retry(NoBackoff(), 0),
                socket_timeout=None,
                client_name="tidegate",
            )
            self._connection = cast(_RedisConnection, pool.make_connection())
        except (ValueError, TypeError):
            raise StoreUnavailable(
                "store.url is not a valid redis://, rediss:// or unix:// address"
            ) from None

    async def exchange(self, commands: Sequence[Command]) -> list[Any]:
        """Send all commands in one write and read their replies; a refused one yields its ResponseError as a value.

        Raises:
            RedisError, OSError: the connection failed; some of the commands may have been carried out.
        """
        connection = self._connection
        try:
            if not connection.is_connected or await connection.can_read():  # the server hung up
                await connection.disconnect(nowait=True)
                await connection.connect()
            await connection.send_packed_command(connection.pack_commands(commands), False)
            return [await self._read() for _ in commands]
        except (
            BaseException
        ):  # a deadline cancels us: replies still to come must not meet other commands
            await connection.disconnect(nowait=True)
            raise

    async def _read(self) -> Any:
        try:
            return await self._connection.read_response()
        except ResponseError as exc:
            return exc

    async def close(self) -> None:
        await self._connection.disconnect(nowait=True)


async def answers(connection: Connection, timeout_s: float) -> bool:
    """Whether the server answers a ping: false while it is gone, frozen or still loading its data."""
    try:
        async with asyncio.timeout(timeout_s):
            await connection.exchange([("PING",)])
    except (TimeoutError, *CONNECTION_ERRORS):
        return False
    return True
