"""A pipeline in front of scripted providers, with its rows and its clock in view."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import aclosing

from cache.responses import NoResponseCache
from gateway.accounting import RequestMeter
from gateway.filters import FilterChain
from gateway.limits import LocalLimiter
from gateway.pipeline import Pipeline
from gateway.queues.online import OnlineQueue
from gateway.router.dispatch import Dispatcher
from gateway.router.routes import Routes
from plugins.events import Event, Request
from plugins.interfaces import (
    Objective,
    Principal,
    ProviderSettings,
    RequestFilter,
    ResponseCache,
    TransformFactory,
    UsageRecord,
)
from plugins.manager import PluginRules
from plugins.testing import ScriptedProvider, VirtualClock

WHO = Principal("web")


class Ledger:
    """Stands for Accounting: keeps the rows."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self.wall_clock = clock
        self.requests_in_flight = 0
        self.rows: list[UsageRecord] = []

    def record(self, row: UsageRecord) -> None:
        self.rows.append(row)


class Scene:
    def __init__(
        self,
        *providers: ScriptedProvider,
        filters: Sequence[RequestFilter] = (),
        transforms: Sequence[TransformFactory] = (),
        on_error: str = "block",
        response_cache: ResponseCache | None = None,
    ) -> None:
        self.clock = VirtualClock()
        self.ledger = Ledger(self.clock)
        self.refused: list[tuple[str, int]] = []
        self.limiter = LocalLimiter(self.clock)
        table = {p.name: (ProviderSettings(p.name, "s", max_retries=0), p) for p in providers}
        routes = Routes(table, self.clock)
        routes.load(
            [("m", tuple(f"{p.name}/up" for p in providers), "ordered", Objective(400, 50))]
        )
        self.pipeline = Pipeline(
            limiter=self.limiter,
            filters=FilterChain([(PluginRules("f", on_error, 0.05), f) for f in filters]),
            transforms=[(PluginRules("t", on_error), t) for t in transforms],
            response_cache=response_cache or NoResponseCache(),
            routes=routes,
            dispatcher=Dispatcher(OnlineQueue(10, 1), self.clock.sleep, random.Random(0)),
            open_meter=lambda request, who: RequestMeter(request, who, self.ledger),  # type: ignore[arg-type]
        )

    async def run(
        self, who: Principal = WHO, on_batch: Callable[[], None] = lambda: None, **fields: object
    ) -> list[Event]:
        request = Request(id="r", dialect="chat", model="m", received_s=self.clock(), **fields)  # type: ignore[arg-type]
        out: list[Event] = []
        async with aclosing(self.pipeline.run(request, who)) as events:
            async for batch in events:
                out += batch
                on_batch()
        return out

    def row(self) -> UsageRecord:
        assert len(self.ledger.rows) == 1
        assert self.ledger.requests_in_flight == 0
        return self.ledger.rows[0]
