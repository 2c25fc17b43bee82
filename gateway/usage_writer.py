"""Takes usage rows off the request's path and into the store: bounded, in batches, each row once.

A store that is killed may lose what it took in its last seconds. So batches are kept until they are surely on its
disk, and the ones that it lost are sent again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from cache.usage_stream import UsageStream
from plugins.interfaces import UsageRecord

log = logging.getLogger("tidegate")
KEEP_S = 4.0  # the embedded store's file is at most 2 s behind


@dataclass(slots=True)
class _Batch:
    number: int
    rows: list[UsageRecord]
    written_s: float = 0.0


class UsageWriter:
    """Rows wait while the store is away, at most `max_waiting` of them; what comes on top is dropped and counted."""

    def __init__(
        self,
        stream: UsageStream,
        *,
        max_waiting: int = 20_000,
        batch_rows: int = 256,
        max_batch_rows: int = 1024,
        flush_interval_s: float = 0.05,
        retry_interval_s: float = 0.25,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.dropped = 0
        self._stream = stream
        self._max_waiting = max_waiting
        self._batch_rows = batch_rows  # are worth a write at once
        self._max_batch_rows = (
            max_batch_rows  # a busy process takes long for each write, so it writes more at a time
        )
        self._flush_interval_s = flush_interval_s
        self._retry_interval_s = retry_interval_s
        self._waiting: deque[UsageRecord] = deque()
        self._clock = clock
        self._kept: deque[_Batch] = (
            deque()
        )  # on their way, or written so lately that a crash may take them back
        self._number = 0  # of the last batch made
        self._stored = 0  # of the last batch that the store said it has
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

    async def aclose(self, timeout_s: float = 2.0) -> None:
        """Write what waits; what the store does not take in time is dropped, and the log says how much."""
        if self._task is not None:
            self._task.cancel()  # a batch on the wire may arrive: it keeps its number and is sent again
            await asyncio.wait([self._task])
            self._task = None
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._waiting or self._stored < self._number:
                    await self._write()
        unsent = sum(len(batch.rows) for batch in self._kept if batch.number > self._stored)
        lost = unsent + len(self._waiting)
        if lost:
            self.dropped += lost
            log.error("usage: %d rows were lost at shutdown, the store did not take them", lost)
        self._waiting.clear()
        self._kept.clear()

    async def _run(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(KEEP_S if self._kept else None):
                    await self._some.wait()
                async with asyncio.timeout(self._flush_interval_s):
                    await self._enough.wait()
            await self._write()

    async def _write(self) -> None:
        """Make a batch of what waits, and try until the store has it and all before it."""
        if self._waiting:
            count = min(self._max_batch_rows, len(self._waiting))
            self._number += 1
            rows = [self._waiting.popleft() for _ in range(count)]
            self._kept.append(_Batch(self._number, rows))
        elif self._kept:
            self._stored = (
                self._kept[-1].number - 1
            )  # quiet: ask whether the last one is still there
        while self._stored < self._number:
            if not await self._send_next():
                await asyncio.sleep(self._retry_interval_s)
        self._forget_what_is_safe()
        if not self._waiting:
            self._some.clear()
        if len(self._waiting) < self._batch_rows:
            self._enough.clear()

    async def _send_next(self) -> bool:
        """Send the first kept batch that the store does not have."""
        batch = next(batch for batch in self._kept if batch.number > self._stored)
        oldest = batch is self._kept[0]
        try:
            stored, taken = await self._stream.append(batch.number, batch.rows, after_gap=oldest)
        except Exception as exc:  # no fault of any kind may end the writing
            if not self._store_lost:
                log.warning("usage: rows wait for the store: %s: %s", type(exc).__name__, exc)
            self._store_lost = True
            return False
        if self._store_lost:
            log.warning("usage: rows are written again; dropped so far: %d", self.dropped)
        self._store_lost = False
        if stored < batch.number:
            log.warning("usage: the store lost its last batches; they are sent again")
        self._stored = stored
        if taken or not batch.written_s:
            batch.written_s = self._clock()
        return True

    def _forget_what_is_safe(self) -> None:
        """The store has all of them now; what it took long enough ago is on its disk."""
        safe_s = self._clock() - KEEP_S
        while self._kept and self._kept[0].written_s <= safe_s:
            self._kept.popleft()

    def _drop(self, count: int) -> None:
        if self.dropped == 0:
            log.error("usage: rows are dropped, %d wait for the store already", self._max_waiting)
        self.dropped += count
