"""Tell plugins' observers about finished requests, each from a bounded queue of its own."""

from __future__ import annotations

import asyncio
import logging

from gateway.filters import cancelled_from_outside
from plugins.interfaces import Observer, UsageRecord
from plugins.manager import PluginRules

log = logging.getLogger("tidegate")


class ObserverQueue:
    """One observer, called by one task, a record at a time; a slow one loses records, nobody else waits for it."""

    def __init__(self, rules: PluginRules, observer: Observer, max_waiting: int = 10_000) -> None:
        self.dropped = 0
        self._rules = rules
        self._observer = observer
        self._queue: asyncio.Queue[UsageRecord] = asyncio.Queue(max_waiting)
        self._task: asyncio.Task[None] | None = None
        self._failing = False

    def offer(self, row: UsageRecord) -> None:
        """Never blocks, never raises."""
        try:
            self._queue.put_nowait(row)
        except asyncio.QueueFull:
            if self.dropped == 0:
                log.warning(
                    "plugin %s: its observer is slow, records are dropped", self._rules.name
                )
            self.dropped += 1

    async def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def aclose(self, timeout_s: float = 1.0) -> None:
        """Hand over what waits, as far as the time goes."""
        if self._task is None:
            return
        handed_over = asyncio.create_task(self._queue.join())
        await asyncio.wait([handed_over], timeout=timeout_s)
        for task in (handed_over, self._task):
            task.cancel()
        await asyncio.wait([handed_over, self._task])
        self._task = None

    async def _run(self) -> None:
        while True:
            row = await self._queue.get()
            try:
                async with asyncio.timeout(self._rules.timeout_s):
                    await self._observer.on_usage(row)
                self._failing = False
            except BaseException as exc:
                if cancelled_from_outside():
                    raise
                if not self._failing:  # one line for a row of failures
                    log.warning(
                        "plugin %s: observer failed: %s: %s",
                        self._rules.name,
                        type(exc).__name__,
                        exc,
                    )
                self._failing = True
            finally:
                self._queue.task_done()
