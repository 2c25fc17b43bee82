"""In which order the targets of a route are tried."""

from __future__ import annotations

from collections.abc import Iterator

from gateway.router.routes import Route, Target
from plugins.errors import Overloaded


def choose(route: Route) -> Iterator[Target]:
    """Policy "ordered": the first that works. Passed over are targets whose breaker is open, and those whose provider
    says that it is not ready while another is.

    Raises:
        Overloaded: every breaker is open; Retry-After says when the first may close.
    """
    ready = [target for target in route.targets if target.provider.ready()]
    tried = False
    for target in ready or route.targets:
        if target.breaker.allows():
            tried = True
            yield target
    if not tried:
        wait_s = min(target.breaker.retry_after_s() for target in route.targets)
        raise Overloaded(
            f"No target of `{route.model}` is healthy at the moment.",
            code="no_healthy_route",
            retry_after_s=max(1.0, wait_s),
        )
