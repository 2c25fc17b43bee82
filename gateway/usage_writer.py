"""Takes usage rows off the request's path and into the store: bounded, in batches, each row once."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from contextlib import suppress

from cache.usage_stream import UsageStream
from plugins.interfaces import UsageRecord

log = logging.getLogger("tidegate")


class UsageWriter:
    """Rows wait while the store is away, at most `max_waiting` of them; what comes on top is dropped and counted."""

    def __init__(
        self,
        stream: UsageStream,
        max_waiting: int = 20_000,
        batch_rows: int = 256,
        flush_interval_s: float = 0.05,
        retry_interval_s: float = 0.25,
    ) -> None:
        self.dropped = 0
        self._stream = stream
        self._max_waiting = max_waiting
        self._batch_rows = batch_rows
        self._flush_interval_s = flush_interval_s
        self._retry_interval_s = retry_interval_s
        self._waiting: deque[UsageRecord] = deque()
        self._batch: list[UsageRecord] = []  # under way; stays the same until the store has it
        self._number = 0  # of that batch
        self._some = asyncio.Event()
        self._enough = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._store_lost = False

    def add(self, row: UsageRecord) -> None:
        """Never blocks, never raises."""
        num_waiting = len(self._waiting)
        if num_waiting >= self._max_waiting:
            self._drop(1)
            return
        self._waiting.append(row)
        if num_waiting == 0:
            self._some.set()
        elif num_waiting + 1 >= self._batch_rows:
            self._enough.set()

    async def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def aclose(self, timeout_s: float = 5.0) -> None:
        """Write what waits; what the store does not take in time is dropped, and the log says how much."""
        if self._task is not None:
            self._task.cancel()  # a batch on the wire may arrive: it keeps its number and is sent again
            await asyncio.wait([self._task])
            self._task = None
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._batch or self._waiting:
                    await self._write_batch()
        lost = len(self._batch) + len(self._waiting)
        if lost:
            self.dropped += lost
            log.error("usage: %d rows were lost at shutdown, the store did not take them", lost)
        self._waiting.clear()
        self._batch = []

    async def _run(self) -> None:
        while True:
            await self._some.wait()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._flush_interval_s):
                    await self._enough.wait()
            await self._write_batch()

    async def _write_batch(self) -> None:
        """Take a batch, unless one is left from before, and try until the store has it."""
        if not self._batch:
            count = min(self._batch_rows, len(self._waiting))
            self._batch = [self._waiting.popleft() for _ in range(count)]
            self._number += 1
        while not await self._is_written():  # noqa: ASYNC110  a retry, not a poll
            await asyncio.sleep(self._retry_interval_s)
        self._batch = []
        if not self._waiting:
            self._some.clear()
        if len(self._waiting) < self._batch_rows:
            self._enough.clear()

    async def _is_written(self) -> bool:
        try:
            await self._stream.append(self._number, self._batch)
        except Exception as exc:  # no fault of any kind may end the writing
            if not self._store_lost:
                log.warning("usage: rows wait for the store: %s: %s", type(exc).__name__, exc)
            self._store_lost = True
            return False
        if self._store_lost:
            log.warning("usage: rows are written again; dropped so far: %d", self.dropped)
        self._store_lost = False
        return True

    def _drop(self, count: int) -> None:
        if self.dropped == 0:
            log.error("usage: rows are dropped, %d wait for the store already", self._max_waiting)
        self.dropped += count
