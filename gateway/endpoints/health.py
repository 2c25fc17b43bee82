"""GET /livez and /readyz. Neither asks for a key; liveness never depends on a provider or the store."""

from __future__ import annotations

from collections.abc import Callable

from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response

from plugins.interfaces import Provider


class Readiness:
    """Ready once every provider has been ready or has had its time to start; not while draining."""

    def __init__(
        self,
        providers: dict[str, Provider],
        any_route_ready: Callable[[], bool],
        clock: Callable[[], float],
        start_grace_s: float = 300.0,
    ) -> None:
        self._starting = dict(providers)
        self._any_route_ready = any_route_ready
        self._clock = clock
        self._grace_until_s = clock() + start_grace_s
        self.draining = False

    def why_not(self) -> str | None:
        """None when requests will be served, else the reason."""
        if self.draining:
            return "draining"
        self._starting = {n: p for n, p in self._starting.items() if not p.ready()}
        if self._starting and self._clock() < self._grace_until_s:
            return f"starting: {', '.join(self._starting)}"
        if not self._any_route_ready():
            return "no provider is ready"
        return None

    async def livez(self, request: HTTPRequest) -> Response:
        return JSONResponse({"status": "alive"})

    async def readyz(self, request: HTTPRequest) -> Response:
        reason = self.why_not()
        body = {"status": "ready"} if reason is None else {"status": "unready", "reason": reason}
        return JSONResponse(body, 200 if reason is None else 503)
