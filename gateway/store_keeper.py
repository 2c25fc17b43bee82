"""Keeps the embedded store running: started before the workers, again whenever it dies, stopped last."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Protocol

from gateway.child import Backoff
from plugins.errors import StoreUnavailable

log = logging.getLogger("tidegate")


class StoreServer(Protocol):
    """What `cache.embedded.EmbeddedStore` does; it keeps its URL over restarts."""

    async def start(self) -> str: ...

    async def wait(self) -> None: ...

    async def stop(self) -> None: ...


class StoreKeeper:
    def __init__(
        self, server: StoreServer, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> None:
        self._server = server
        self._sleep = sleep
        self._keeping: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """The URL of the running store. Raises StoreUnavailable."""
        url = await self._server.start()
        self._keeping = asyncio.create_task(self._keep())
        return url

    async def stop(self) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
            with suppress(asyncio.CancelledError):
                await self._keeping
        await self._server.stop()

    async def _keep(self) -> None:
        backoff = Backoff(0.5)
        loop = asyncio.get_running_loop()
        while True:
            started_s = loop.time()
            await self._server.wait()
            delay_s = backoff.after(loop.time() - started_s)
            log.error("the store ended; again in %.1f s", delay_s)
            while True:
                await self._sleep(delay_s)
                try:
                    await self._server.start()
                    break
                except StoreUnavailable as exc:
                    delay_s = backoff.after(0)
                    log.error("the store does not start: %s; again in %.1f s", exc, delay_s)
