"""Whole answers, kept to be given again. So far none are: `cache.mode = "off"`."""

from __future__ import annotations

from plugins.events import Event, Request
from plugins.interfaces import Principal


class NoResponseCache:
    """The stage when nothing is kept: the pipeline passes it by and may forward bytes."""

    enabled = False

    async def get(self, request: Request, principal: Principal) -> list[Event] | None:
        return None

    async def put(self, request: Request, principal: Principal, events: list[Event]) -> None:
        pass
