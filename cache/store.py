"""The one client of the store: one write for all calls of an event-loop turn, a deadline for each, a breaker for all.

While one batch of calls is on the wire the next one gathers, so load makes batches larger, not queues longer. After
three failed batches in a row the breaker opens: calls fail at once, and a probe in the background closes it again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from redis.exceptions import NoScriptError, ResponseError

from cache.breaker import Breaker
from cache.connection import Command, Connection, Encodable, answers
from cache.scripts import Script
from plugins.errors import StoreUnavailable

log = logging.getLogger("tidegate")
FIRST_PROBE_S = (
    0.1  # doubled after each probe until a real call goes well: a ping may be all that works
)
_Call = tuple[Command, asyncio.Future[Any]]


class Store:
    """`url` is redis://, rediss:// or unix://; `timeout_ms` bounds every call from the moment it is made.

    Belongs to one event loop; nothing is opened before the first call, and a lost server is found again by itself.
    """

    def __init__(
        self,
        url: str,
        timeout_ms: float,
        key_prefix: str = "tidegate:",
        max_probe_interval_s: float = 1.0,
        heartbeat_s: float = 5.0,
    ) -> None:
        self.timeout_ms = timeout_ms
        self.healthy = False  # whether the latest exchange went well
        self._key_prefix = key_prefix
        self._max_probe_interval_s = max_probe_interval_s
        self._probe_interval_s = FIRST_PROBE_S
        self._heartbeat_s = heartbeat_s
        self._connection = Connection(url)
        self._breaker = Breaker()
        self._waiting: list[_Call] = []
        self._waiting_since_s = 0.0
        self._sender: asyncio.Task[None] | None = None
        self._prober: asyncio.Task[None] | None = None
        self._heart: asyncio.Task[None] | None = None
        self._sources: dict[str, str] = {}  # of the scripts run so far, by SHA
        self._closed = False

    def key(self, name: str) -> str:
        return self._key_prefix + name

    async def start(self) -> None:
        """Connect now, and keep `healthy` true to life while nobody calls. Optional; does not fail with the server."""
        await self._beat()
        if self._heart is None:
            self._heart = asyncio.create_task(self._keep_beating())

    async def call(self, *command: Encodable) -> Any:
        """Run one command.

        Raises:
            StoreUnavailable: no answer in time, no connection, or the server refused the command. Except in the last
                case it may have been carried out all the same.
        """
        if self._closed:
            raise StoreUnavailable("the store client is closed")
        if self._breaker.is_open:
            raise StoreUnavailable("the store does not answer")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        if not self._waiting:
            self._waiting_since_s = loop.time()
        self._waiting.append((command, future))
        if self._sender is None:
            self._sender = loop.create_task(self._send_waiting())
        return await future

    async def run(
        self, script: Script, keys: Sequence[str], arguments: Sequence[Encodable] = ()
    ) -> Any:
        """Run a script on complete keys (from `key`), which share a hash tag. Raises as `call` does."""
        self._sources[script.sha] = script.source
        return await self.call("EVALSHA", script.sha, len(keys), *keys, *arguments)

    async def ping(self) -> None:
        """Raises StoreUnavailable where the store does not answer."""
        await self.call("PING")

    async def aclose(self) -> None:
        """Calls still waiting fail."""
        self._closed = True
        for task in (self._heart, self._sender, self._prober):
            if task is not None:
                task.cancel()
                await asyncio.wait([task])
        _fail(self._take_waiting(), "the store client is closed")
        await self._connection.close()

    async def _beat(self) -> None:
        with suppress(StoreUnavailable):
            await self.ping()

    async def _keep_beating(self) -> None:
        while True:
            await asyncio.sleep(self._heartbeat_s)
            await self._beat()

    async def _send_waiting(self) -> None:
        try:
            while self._waiting:
                deadline_s = self._waiting_since_s + self.timeout_ms / 1000
                await self._send(self._take_waiting(), deadline_s)
        finally:
            self._sender = None

    def _take_waiting(self) -> list[_Call]:
        calls, self._waiting = self._waiting, []
        return calls

    async def _send(self, calls: list[_Call], deadline_s: float) -> None:
        commands = [command for command, _ in calls]
        try:
            async with asyncio.timeout_at(deadline_s):
                replies = await self._exchange(commands)
        except TimeoutError as exc:
            self._failed(calls, f"the store did not answer within {self.timeout_ms:g} ms", exc)
        except Exception as exc:  # whatever it is, it may cost the calls but not the requests
            self._failed(calls, f"the store cannot be used: {type(exc).__name__}", exc)
        except asyncio.CancelledError:
            _fail(calls, "the store client is closed")
            raise
        else:
            self._succeeded()
            self._probe_interval_s = FIRST_PROBE_S
            _deliver(calls, replies)

    async def _exchange(self, commands: list[Command]) -> list[Any]:
        """One round trip; a second one where the server has forgotten a script."""
        replies = await self._connection.exchange(commands)
        unknown = [
            i
            for i, reply in enumerate(replies)
            if isinstance(reply, NoScriptError) and commands[i][1] in self._sources
        ]
        if unknown:
            shas = dict.fromkeys(str(commands[i][1]) for i in unknown)
            loads: list[Command] = [("SCRIPT", "LOAD", self._sources[sha]) for sha in shas]
            again = await self._connection.exchange(loads + [commands[i] for i in unknown])
            for i, reply in zip(unknown, again[len(loads) :], strict=True):
                replies[i] = reply
        return replies

    def _succeeded(self) -> None:
        self.healthy = True
        self._breaker.record_success()

    def _failed(self, calls: list[_Call], message: str, cause: Exception) -> None:
        self.healthy = False
        self._breaker.record_failure()
        if self._breaker.is_open:
            calls = calls + self._take_waiting()
            log.warning("store: %s; calls fail at once until it answers again", message)
            self._prober = asyncio.get_running_loop().create_task(self._probe())
        _fail(calls, message, cause)

    async def _probe(self) -> None:
        """Ask until the store answers. Runs only while the breaker keeps everybody else off the connection."""
        while self._breaker.is_open:
            await asyncio.sleep(min(self._probe_interval_s, self._max_probe_interval_s))
            self._probe_interval_s = min(2 * self._probe_interval_s, self._max_probe_interval_s)
            if await answers(self._connection, self.timeout_ms / 1000):
                self._succeeded()
                log.warning("store: answers again")


def _deliver(calls: list[_Call], replies: list[Any]) -> None:
    for (command, future), reply in zip(calls, replies, strict=True):
        if future.done():  # its caller was cancelled
            continue
        if isinstance(reply, ResponseError):
            code = str(reply).split(" ", 1)[0]  # the rest may repeat what the command held
            future.set_exception(StoreUnavailable(f"the store refused {command[0]}: {code}"))
        else:
            future.set_result(reply)


def _fail(calls: list[_Call], message: str, cause: Exception | None = None) -> None:
    for _, future in calls:
        if not future.done():
            error = StoreUnavailable(
                message
            )  # one each: raising an exception twice mixes tracebacks
            error.__cause__ = cause
            future.set_exception(error)
