"""Send a request to one target after another until content flows: retries, fallback, breakers, in one place.

Nothing is tried again once content has reached the client: a second answer is never glued onto half of a first.
"""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing

from gateway.accounting import RequestMeter
from gateway.errors import as_error
from gateway.queues.online import OnlineQueue
from gateway.router import policy
from gateway.router.routes import Route, Target
from plugins.errors import GatewayError, UpstreamError, UpstreamTimeout, UpstreamUnavailable
from plugins.events import Event, Failed, Request, has_content, is_ended
from plugins.interfaces import Call

MAX_RETRY_AFTER_S = 5.0  # a longer wish of the upstream is passed on to the client instead
BACKOFF_BASE_S = 0.25
BACKOFF_MAX_S = 2.0
MAX_HELD_EVENTS = 1024  # before content: a beginning is a few events, a heartbeat one a second
OWN_FAULTS = frozenset({401, 403, 404})  # of this target: trying it again cannot help


class Dispatcher:
    def __init__(
        self,
        queue: OnlineQueue,
        sleep: Callable[[float], Awaitable[None]],
        rng: random.Random,
    ) -> None:
        self._queue = queue
        self._sleep = sleep
        self._rng = rng

    async def stream(
        self,
        request: Request,
        route: Route,
        meter: RequestMeter,
        *,
        tenant: str,
        verbatim: bool,
    ) -> AsyncGenerator[list[Event], None]:
        """Events of the first target that gives content.

        Raises:
            GatewayError: the client's own fault at once, else the last target's error.
        """
        last_error: GatewayError | None = None
        for target in policy.choose(route, request.dialect):
            for attempt in range(1 + target.settings.max_retries):
                meter.target_chosen(target.name)
                call = Call(target.upstream_model, tenant, verbatim, attempt + 1, route.objective)
                started = False
                try:
                    tries = self._attempt(request, target, call)
                    async with aclosing(tries) as events:
                        async for batch in events:
                            started = True
                            yield batch
                    return
                except GatewayError as error:
                    if started or not error.retryable:
                        raise
                    last_error = error
                if attempt == target.settings.max_retries or not _worth_another_try(last_error):
                    break
                await self._sleep(self._backoff_s(attempt, last_error))
        assert last_error is not None  # choose() yields or raises
        raise _for_client(last_error)

    async def _attempt(
        self, request: Request, target: Target, call: Call
    ) -> AsyncGenerator[list[Event], None]:
        """One try at one target. What comes before content is held, so that a failure there stays unseen."""
        call.verbatim &= request.dialect in target.provider.dialects
        held: list[Event] = []
        flowing = ended = False
        async with self._queue.slot(target.settings.name, target.settings.max_parallel, request):
            try:
                async with aclosing(target.provider.stream(request, call)) as events:
                    async for batch in events:
                        if batch and isinstance(batch[-1], Failed):
                            raise as_error(batch[-1])
                        ended = ended or is_ended(batch)
                        if flowing:
                            yield batch
                            continue
                        held += batch
                        if has_content(batch):
                            flowing = True
                            target.breaker.succeeded()
                            yield held
                        elif len(held) > MAX_HELD_EVENTS:
                            name = target.settings.name
                            raise UpstreamUnavailable(f"{name}: the answer begins without end")
                if not ended:
                    what = "ended too early" if flowing else "was empty"
                    raise UpstreamUnavailable(f"{target.settings.name}: the answer {what}")
            except GatewayError as error:
                if isinstance(error, UpstreamError) and error.retryable and target.provider.ready():
                    target.breaker.failed()  # one that is not ready says so itself
                raise

    def _backoff_s(self, attempt: int, error: GatewayError) -> float:
        """Exponential with full jitter; an upstream's Retry-After is a floor."""
        backoff_s = min(BACKOFF_MAX_S, BACKOFF_BASE_S * 2**attempt) * self._rng.random()
        return max(backoff_s, error.retry_after_s or 0.0)


def _worth_another_try(error: GatewayError) -> bool:
    """Whether the same target may answer on a second try: not after a silence, nor when it wants a long rest."""
    if isinstance(error, UpstreamTimeout) or error.status in OWN_FAULTS:
        return False
    return error.retry_after_s is None or error.retry_after_s <= MAX_RETRY_AFTER_S


def _for_client(error: GatewayError) -> GatewayError:
    """An upstream that refuses *our* key or model must not look like the client's own mistake."""
    if isinstance(error, UpstreamError) and error.status in OWN_FAULTS:
        return UpstreamError(error.message, code=error.code or "upstream_refused")
    return error
