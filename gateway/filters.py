"""Run the plugins' request filters and stream transforms, with their time limit and their `on_error`.

Whatever a plugin raises is its failure, SystemExit and CancelledError too: it may cost its request, nothing more.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

from plugins.errors import GatewayError, PluginFailed
from plugins.events import Event, Finished, Request, Usage
from plugins.interfaces import Context, RequestFilter, StreamTransform, TransformFactory
from plugins.manager import PluginRules

log = logging.getLogger("tidegate")
_T = TypeVar("_T")


class FilterChain:
    """All filters, in config order."""

    def __init__(self, filters: Sequence[tuple[PluginRules, RequestFilter]]) -> None:
        self._filters = tuple(filters)
        self.keeps_body = all(getattr(f, "read_only", False) for _, f in self._filters)
        """True while no filter may change the request: then the client's own bytes may be forwarded."""

    async def apply(self, request: Request, context: Context) -> Request:
        for rules, request_filter in self._filters:
            try:
                async with asyncio.timeout(rules.timeout_s):
                    changed = await request_filter.apply(request, context)
                request = _checked(changed, Request)
            except (GatewayError, GeneratorExit):
                raise  # a refusal is the filter's decision, not its failure
            except BaseException as exc:
                if cancelled_from_outside():
                    raise
                _failed(rules, "request filter", exc)
        return request


class TransformChain:
    """The transforms of one request. `Finished` and `Usage` wait until what was held back is out."""

    def __init__(self, transforms: Sequence[tuple[PluginRules, StreamTransform]]) -> None:
        self._transforms = transforms
        self._ends: list[Event] = []

    @classmethod
    def build(
        cls,
        factories: Sequence[tuple[PluginRules, TransformFactory]],
        request: Request,
        context: Context,
    ) -> TransformChain | None:
        """None where no transform wants this request: then bytes may pass untouched."""
        built: list[tuple[PluginRules, StreamTransform]] = []
        for rules, factory in factories:
            try:
                transform = factory(request, context)
            except GatewayError:
                raise
            except BaseException as exc:
                _failed(rules, "transform factory", exc)
                continue
            if transform is not None:
                built.append((rules, transform))
        return cls(built) if built else None

    async def stream(
        self, source: AsyncGenerator[list[Event], None]
    ) -> AsyncGenerator[list[Event], None]:
        async with aclosing(source) as batches:
            async for batch in batches:
                if out := self._feed(batch):
                    yield out
        yield self._flush()

    def _feed(self, batch: list[Event]) -> list[Event]:
        content: list[Event] = []
        for event in batch:
            (self._ends if isinstance(event, Finished | Usage) else content).append(event)
        return self._through(content, 0)

    def _flush(self) -> list[Event]:
        out: list[Event] = []
        for position, (rules, transform) in enumerate(self._transforms):
            try:
                released = _checked(transform.flush(), list)
            except GatewayError:
                raise
            except BaseException as exc:
                _failed(rules, "transform flush", exc)
                continue
            out += self._through(released, position + 1)
        return out + self._ends

    def _through(self, events: list[Event], first: int) -> list[Event]:
        for rules, transform in self._transforms[first:]:
            if not events:
                break
            try:
                events = _checked(transform.feed(events), list)
            except GatewayError:
                raise
            except BaseException as exc:
                _failed(rules, "transform", exc)
        return events


def _checked(value: _T, wanted: type) -> _T:
    """A plugin that forgot its `return` has failed, and `on_error` says what that means."""
    if not isinstance(value, wanted):
        raise TypeError(f"returned {type(value).__name__}, not {wanted.__name__}")
    return value


def cancelled_from_outside() -> bool:
    """Whether this task is being cancelled, rather than a plugin having raised CancelledError by itself."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _failed(rules: PluginRules, what: str, exc: BaseException) -> None:
    """Log; go on without the plugin's say when its `on_error` is "allow", else fail the request."""
    log.warning("plugin %s: %s failed: %s: %s", rules.name, what, type(exc).__name__, exc)
    if rules.on_error != "allow":
        raise PluginFailed(f"The plugin {rules.name} failed.", code="plugin_failed") from exc
