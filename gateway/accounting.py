"""One usage row for every request, on every way out: metered while it runs, written after it, never waited for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from cache.store import Store
from cache.usage_stream import UsageStream
from gateway.observers import ObserverQueue
from gateway.usage_writer import UsageWriter
from plugins.errors import GatewayError, Overloaded, StoreUnavailable, UpstreamError
from plugins.events import (
    CONTENT_EVENTS,
    Embedding,
    Event,
    Finished,
    Request,
    Text,
    Usage,
    Verbatim,
)
from plugins.interfaces import Observer, Principal, UsageRecord
from plugins.manager import PluginRules

BYTES_PER_TOKEN = 4  # of a prompt whose tokens nobody has counted
MAX_MODEL_CHARS = 200


class UsageListener(Protocol):
    """Hears of every row at once, in the request's own turn: it must be quick and must not raise."""

    def record(self, row: UsageRecord) -> None: ...


class Accounting:
    """Hands each finished request's row to the metrics, the store and the observers."""

    def __init__(
        self,
        store: Store,
        observers: Sequence[tuple[PluginRules, Observer]],
        telemetry: UsageListener,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.clock = clock
        self.wall_clock = wall_clock
        self.requests_in_flight = 0
        self._telemetry = telemetry
        self._writer = UsageWriter(UsageStream(store))
        self._observers = [ObserverQueue(rules, observer) for rules, observer in observers]

    @property
    def rows_dropped(self) -> int:
        """Rows that the store will never have."""
        return self._writer.dropped

    @property
    def observer_records_dropped(self) -> int:
        return sum(observer.dropped for observer in self._observers)

    def record(self, row: UsageRecord) -> None:
        """Take a row. Never blocks, never raises."""
        self._telemetry.record(row)
        self._writer.add(row)
        for observer in self._observers:
            observer.offer(row)

    async def start(self) -> None:
        await self._writer.start()
        for observer in self._observers:
            await observer.start()

    async def aclose(self) -> None:
        """Write and hand over what waits, for a few seconds at most. Call before the store is closed."""
        await asyncio.gather(self._writer.aclose(), *(o.aclose() for o in self._observers))


class RequestMeter:
    """What one request came to. `close` must be reached on every way out; the first call writes the row."""

    __slots__ = (
        "_accounting",
        "_attempts",
        "_first_content_s",
        "_model",
        "_num_chunks",
        "_open",
        "_principal",
        "_reported",
        "_request",
        "_started_at_s",
        "_target",
    )

    def __init__(self, request: Request, principal: Principal, accounting: Accounting) -> None:
        self._request = request
        self._model = request.model  # as the client asked: a filter may change the request itself
        self._principal = principal
        self._accounting = accounting
        self._started_at_s = accounting.wall_clock()
        self._target = ""
        self._attempts = 0
        self._first_content_s: float | None = None
        self._num_chunks = 0
        self._reported: Usage | None = None
        self._open = True
        accounting.requests_in_flight += 1

    @property
    def reached_target(self) -> bool:
        return self._attempts > 0

    @property
    def has_content(self) -> bool:
        return self._first_content_s is not None

    def target_chosen(self, target: str) -> None:
        """One more attempt, at "provider/upstream model"."""
        self._target = target
        self._attempts += 1

    def on_events(self, events: list[Event]) -> None:
        """Look at a batch on its way to the client."""
        for event in events:
            if isinstance(event, Verbatim):
                if event.has_content:
                    self._count(event.num_chunks)
            elif isinstance(event, Usage):
                self._reported = (
                    event  # later ones replace earlier: dialects that count up send several
                )
            elif isinstance(event, CONTENT_EVENTS):
                self._count(0 if isinstance(event, Finished | Embedding) else 1)

    def _count(self, num_chunks: int) -> None:
        self._num_chunks += num_chunks
        if self._first_content_s is None:
            self._first_content_s = self._accounting.clock()

    def usage(self) -> Usage:
        """What the provider reported, else an estimate: a token a chunk, four bytes of prompt a token."""
        if self._reported is not None:
            return self._reported
        if not self.reached_target:
            return Usage()
        return Usage(
            prompt_tokens=estimate_prompt_tokens(self._request),
            completion_tokens=self._num_chunks,
            estimated=True,
        )

    def outcome_of(self, error: GatewayError) -> str:
        """ "rejected" where the gateway or engine refused before any work, else "error"."""
        refused = not isinstance(error, UpstreamError) and (
            error.status < 500 or isinstance(error, Overloaded | StoreUnavailable)
        )
        return "rejected" if refused and not self.has_content else "error"

    def close(self, status: int, outcome: str, error_code: str = "") -> None:
        """Write the row. A second call does nothing, so the innermost reason stays."""
        if not self._open:
            return
        self._open = False
        self._accounting.requests_in_flight -= 1
        request, first_s = self._request, self._first_content_s
        failed_unbilled = outcome in ("error", "rejected") and first_s is None
        self._accounting.record(
            UsageRecord(
                request_id=request.id,
                principal=self._principal.name,
                dialect=request.dialect,
                model=_printable(request.model),
                target=self._target,
                status=status,
                outcome=outcome,
                stream=request.stream,
                klass=request.klass,
                attempts=self._attempts,
                usage=(self._reported or Usage()) if failed_unbilled else self.usage(),
                started_at_s=self._started_at_s,
                ttft_ms=None if first_s is None else (first_s - request.received_s) * 1000,
                duration_ms=(self._accounting.clock() - request.received_s) * 1000,
                error_code=error_code,
            )
        )


def estimate_prompt_tokens(request: Request) -> int:
    """Token ids count as they are; text four bytes a token; a body nobody has decoded, as text."""
    num_ids = sum(len(prompt) for prompt in request.prompts if isinstance(prompt, list))
    texts = [prompt for prompt in request.prompts if isinstance(prompt, str)]
    for message in request.messages:
        texts += [part.text for part in message.parts if isinstance(part, Text)]
    if not texts and not num_ids:
        return len(request.body) // BYTES_PER_TOKEN
    return num_ids + sum(len(text.encode(errors="replace")) for text in texts) // BYTES_PER_TOKEN


def _printable(model: str) -> str:
    """The client's own word, which may be anything, at a length and in a form that can be stored."""
    return model[:MAX_MODEL_CHARS].encode(errors="replace").decode()
