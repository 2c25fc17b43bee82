"""In which order the targets of a route are tried."""

from __future__ import annotations

from collections.abc import Iterator

from gateway.router.routes import Route, Target
from plugins.errors import Overloaded, Unsupported
from plugins.events import Dialect


def choose(route: Route, dialect: Dialect) -> Iterator[Target]:
    """Policy "ordered": the first that works. Passed over are targets whose breaker is open, and those whose provider
    says that it is not ready while another is; for embeddings also those that give none.

    Raises:
        Unsupported: embeddings are asked for, and no target gives any.
        Overloaded: every breaker is open; Retry-After says when the first may close.
    """
    able = [target for target in route.targets if _answers(target, dialect)]
    if not able:
        raise Unsupported(f"The model `{route.model}` gives no embeddings.", param="model")
    ready = [target for target in able if target.provider.ready()]
    tried = False
    for target in ready or able:
        if target.breaker.allows():
            tried = True
            yield target
    if not tried:
        wait_s = min(target.breaker.retry_after_s() for target in able)
        raise Overloaded(
            f"No target of `{route.model}` is healthy at the moment.",
            code="no_healthy_route",
            retry_after_s=max(1.0, wait_s),
        )


def _answers(target: Target, dialect: Dialect) -> bool:
    """Chats and completions can be told in each other's words; vectors only come from who makes them."""
    return dialect != "embeddings" or getattr(target.provider, "embeds", False)
