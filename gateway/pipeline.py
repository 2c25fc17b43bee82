"""The one straight line that every request follows, whatever its endpoint, online or as a line of a batch.

auth.check and endpoint.decode have happened; here: routes.find -> limits.reserve -> filters.apply ->
response_cache.get -> dispatcher.stream (queue slot, provider.stream, fallback) -> transforms -> limits.settle ->
accounting.record.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

from gateway.accounting import RequestMeter
from gateway.filters import FilterChain, TransformChain
from gateway.router.dispatch import Dispatcher
from gateway.router.routes import Route, Routes
from plugins.errors import GatewayError
from plugins.events import Event, Request
from plugins.interfaces import Context, Limiter, Principal, ResponseCache, TransformFactory
from plugins.manager import PluginRules

log = logging.getLogger("tidegate")


class Pipeline:
    """Holds the stages; keeps nothing of a request once it is done."""

    def __init__(
        self,
        *,
        limiter: Limiter,
        filters: FilterChain,
        transforms: Sequence[tuple[PluginRules, TransformFactory]],
        response_cache: ResponseCache,
        routes: Routes,
        dispatcher: Dispatcher,
        open_meter: Callable[[Request, Principal], RequestMeter],
    ) -> None:
        self._limiter = limiter
        self._filters = filters
        self._transforms = transforms
        self._response_cache = response_cache
        self._routes = routes
        self._dispatcher = dispatcher
        self._open_meter = open_meter

    async def run(
        self, request: Request, principal: Principal
    ) -> AsyncGenerator[list[Event], None]:
        """The answer in batches of events. Leaving early (aclose, cancellation) stops the work upstream.

        Exactly one usage row is written, on every way out.

        Raises:
            GatewayError: before or after the first batch.
        """
        meter = self._open_meter(request, principal)
        try:
            async with aclosing(self._answer(request, principal, meter)) as events:
                async for batch in events:
                    meter.on_events(batch)
                    yield batch
            meter.close(200, "ok")
        except GatewayError as error:
            meter.close(error.status, meter.outcome_of(error), error.code or error.type)
            raise
        except (asyncio.CancelledError, GeneratorExit):
            meter.close(499, "cancelled")
            raise
        except BaseException as exc:  # SystemExit too: no way out without a row
            log.exception("request %s failed inside the gateway", request.id)
            meter.close(500, "error", "internal_error")
            raise GatewayError(
                "The gateway failed on this request.", code="internal_error"
            ) from exc

    async def _answer(
        self, request: Request, principal: Principal, meter: RequestMeter
    ) -> AsyncGenerator[list[Event], None]:
        route = self._routes.find(request.model, principal)
        lease = await self._limiter.reserve(principal, request)
        try:
            context = Context(request.id, principal, request.dialect)
            request = await self._filters.apply(request, context)
            if self._response_cache.enabled:
                events = self._kept_or_new(request, context, route, meter)
            else:
                events = self._new(request, context, route, meter, self._filters.keeps_body)
            async with aclosing(events):
                async for batch in events:
                    yield batch
        finally:
            if meter.has_content:
                lease.settle(meter.usage())
            else:  # refused, or failed before a token: nothing was used
                lease.refund()

    def _new(
        self,
        request: Request,
        context: Context,
        route: Route,
        meter: RequestMeter,
        may_pass_as_bytes: bool,
    ) -> AsyncGenerator[list[Event], None]:
        chain = TransformChain.build(self._transforms, request, context)
        events = self._dispatcher.stream(
            request,
            route,
            meter,
            tenant=context.principal.name,
            verbatim=chain is None and may_pass_as_bytes,
        )
        return events if chain is None else chain.stream(events)

    async def _kept_or_new(
        self, request: Request, context: Context, route: Route, meter: RequestMeter
    ) -> AsyncGenerator[list[Event], None]:
        """Only an answer that came to its end is kept: a failure or a client that leaves gets past `put`."""
        kept = await self._response_cache.get(request, context.principal)
        if kept is not None:
            yield kept
            return
        answer: list[Event] = []
        async with aclosing(self._new(request, context, route, meter, False)) as events:
            async for batch in events:
                answer += batch
                yield batch
        await self._response_cache.put(request, context.principal, answer)
