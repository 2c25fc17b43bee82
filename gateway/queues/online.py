"""Waiting for a free place at a provider: bounded in number and time, most urgent class first."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from dataclasses import dataclass, field

from plugins.errors import Overloaded
from plugins.events import Request

CLASS_ORDER = {"interactive": 0, "standard": 1, "flex": 2, "batch": 3}


@dataclass(slots=True)
class _Gate:
    """One provider's places. Waiters are granted in order of (class, arrival); a granted one holds its place."""

    in_flight: int = 0
    waiters: list[tuple[int, int, asyncio.Future[None]]] = field(
        default_factory=list[tuple[int, int, "asyncio.Future[None]"]]
    )


class OnlineQueue:
    """Places at all providers. `max_waiting` requests may wait in all, each `max_wait_s`; beyond: 503 Retry-After."""

    def __init__(self, max_waiting: int, max_wait_s: float) -> None:
        self._max_waiting = max_waiting
        self._max_wait_s = max_wait_s
        self._gates: dict[str, _Gate] = {}
        self._sequence = itertools.count()
        self.num_waiting = 0

    def in_flight(self, provider: str) -> int:
        gate = self._gates.get(provider)
        return gate.in_flight if gate else 0

    def slot(self, provider: str, max_parallel: int, request: Request) -> Slot:
        """A place at `provider` for the time of an `async with`; `max_parallel` 0 = no cap.

        Entering raises:
            Overloaded: too many wait already, or no place came free in time.
        """
        gate = self._gates.get(provider)
        if gate is None:
            gate = self._gates[provider] = _Gate()
        return Slot(self, gate, provider, max_parallel, request)

    async def wait(self, gate: _Gate, provider: str, request: Request) -> None:
        if self.num_waiting >= self._max_waiting:
            raise _overloaded(provider, f"{self._max_waiting} requests wait already")
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        order = (CLASS_ORDER[request.klass], next(self._sequence), granted)
        heapq.heappush(gate.waiters, order)
        self.num_waiting += 1
        try:
            async with asyncio.timeout(self._max_wait_s):
                await granted
        except TimeoutError:
            self._give_up(gate, granted)
            raise _overloaded(provider, f"no place came free in {self._max_wait_s:g} s") from None
        except asyncio.CancelledError:
            self._give_up(gate, granted)
            raise
        finally:
            self.num_waiting -= 1

    def _give_up(self, gate: _Gate, granted: asyncio.Future[None]) -> None:
        """The waiter leaves. A place that was granted in the same instant goes to the next one."""
        if granted.done() and not granted.cancelled():
            gate.in_flight -= 1
            self.grant(gate)
        else:
            granted.cancel()

    @staticmethod
    def grant(gate: _Gate) -> None:
        while gate.waiters:
            granted = heapq.heappop(gate.waiters)[2]
            if not granted.done():
                gate.in_flight += 1
                granted.set_result(None)
                return


class Slot:
    """A place that is taken on entering and given back on leaving; a class, as a generator takes 8 us more."""

    __slots__ = ("_gate", "_max_parallel", "_provider", "_queue", "_request")

    def __init__(
        self, queue: OnlineQueue, gate: _Gate, provider: str, max_parallel: int, request: Request
    ) -> None:
        self._queue = queue
        self._gate = gate
        self._provider = provider
        self._max_parallel = max_parallel
        self._request = request

    async def __aenter__(self) -> None:
        gate = self._gate
        if self._max_parallel and (gate.in_flight >= self._max_parallel or gate.waiters):
            await self._queue.wait(gate, self._provider, self._request)
        else:
            gate.in_flight += 1

    async def __aexit__(self, *_: object) -> None:
        self._gate.in_flight -= 1
        self._queue.grant(self._gate)


def _overloaded(provider: str, why: str) -> Overloaded:
    return Overloaded(
        f"{provider} is busy: {why}. Try again later.", code="queue_full", retry_after_s=1.0
    )
