"""What plugs in, as Protocols and the small structs that cross the border. Nothing here imports the gateway."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from msgspec import Struct

from plugins.events import Dialect, Event, Request, Usage
from plugins.secrets import Secret

# -- Who asks --------------------------------------------------------------------------------------------------------


class Limits(Struct, frozen=True):
    """Limits of one key; None = no limit. `budget_window` is when `max_tokens_total` and `budget_usd` start anew."""

    rpm: int | None = None
    tpm: int | None = None
    max_parallel: int | None = None
    max_tokens_total: int | None = None
    budget_usd: float | None = None
    budget_window: str = "never"


@dataclass(frozen=True, slots=True)
class Principal:
    """An authenticated caller. `name` is what logs, metrics and usage rows show."""

    name: str
    models: frozenset[str] | None = None  # None: all, also those added later
    limits: Limits = Limits()

    def may_use(self, model: str) -> bool:
        return self.models is None or model in self.models


# -- Providers -------------------------------------------------------------------------------------------------------


class Timeout(Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds: to connect, to the first byte of content, between two events, and for all of it."""

    connect_s: float = 5.0
    first_token_s: float = 120.0
    idle_s: float = 60.0
    total_s: float = 900.0


class Breaker(Struct, frozen=True, forbid_unknown_fields=True):
    """`failures` in a row close the route for `open_s`; 0 = never."""

    failures: int = 5
    open_s: float = 10.0


@dataclass(frozen=True, slots=True)
class ProviderSettings:
    """One `[[providers]]` table, checked and with its secrets resolved."""

    name: str
    type: str
    base_url: str = ""
    api_key: Secret | None = None
    headers: Mapping[str, Secret] = field(default_factory=dict[str, Secret])
    timeout: Timeout = Timeout()
    max_retries: int = 1
    max_parallel: int = 0
    breaker: Breaker = Breaker()
    path: str = ""  # as written: "demo", "hub:owner/name", or an absolute path
    template: str = ""  # absolute path, or "" for the model's own
    engine: Mapping[str, Any] = field(default_factory=dict[str, Any])
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class Runtime:
    """Where a provider lives: paths it may use, made by the gateway."""

    data_dir: Path
    run_dir: Path  # 0700, short enough for Unix sockets


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """A child process that the supervisor keeps alive. It must end when its standard input closes."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    stdin: bytes = b""  # written once after the start; the pipe stays open
    restart_backoff_s: float = 0.5  # doubled at each quick death, up to 10 s


@dataclass(frozen=True, slots=True)
class Objective:
    """How fast answers of a model are meant to be: `slo` of its `[[models]]` entry. None: nothing is asked."""

    ttft_ms: float | None = None  # to the first token
    tpot_ms: float | None = None  # from one token to the next


@dataclass(slots=True)
class Call:
    """One attempt at one target."""

    upstream_model: str  # the part of the target after "provider/"
    tenant: str = (
        ""  # the caller's name: tenants never share cached work unless a provider is told so
    )
    verbatim: bool = False  # same dialect, and nothing needs to see content: answer in `Verbatim`
    attempt: int = 1
    objective: Objective = Objective()


class Provider(Protocol):
    """Something that answers requests: a remote API, the in-repo engine, a plugin's own model.

    `dialects` are those whose bodies and answers it can carry verbatim. One that answers embeddings requests, with
    `Embedding` events, says so with `embeds = True`; others never see any.
    """

    name: str
    dialects: frozenset[Dialect]

    async def start(self) -> None:
        """Called once in the event loop that will use the provider; opens pools, starts background tasks."""
        ...

    async def aclose(self) -> None: ...

    def ready(self) -> bool:
        """Whether a request sent now has a chance; read by /readyz and the router, so it must not block."""
        ...

    def stream(self, request: Request, call: Call) -> AsyncGenerator[list[Event], None]:
        """Answer in batches of events that arrived together; the first event is `Started`.

        Closing the generator (the client left, a deadline passed) must stop the work upstream within a second.

        Raises:
            GatewayError: before or after content; the pipeline turns it into a status, a fallback or an error event.
        """
        ...

    def stats(self) -> Mapping[str, float]:
        """Gauges for /metrics by short name, such as `kv_blocks_free`; may be empty."""
        ...


class ProviderType(Protocol):
    """What `type = "..."` in `[[providers]]` names."""

    name: str
    default_base_url: str  # "" where base_url must be given or means nothing

    def check(self, settings: ProviderSettings) -> list[str]:
        """Faults that refuse the start, each as "key: what is wrong" below the provider's table. Must be quick."""
        ...

    def prepare(self, settings: ProviderSettings, runtime: Runtime) -> None:
        """Once before any process starts: fetch files, say what is happening on the terminal.

        Raises:
            GatewayError: the start is refused with its message.
        """
        ...

    def processes(self, settings: ProviderSettings, runtime: Runtime) -> list[ProcessSpec]:
        """Child processes this provider needs; most need none."""
        ...

    def build(self, settings: ProviderSettings, runtime: Runtime) -> Provider: ...


# -- Request filters and stream transforms ---------------------------------------------------------------------------


@dataclass(slots=True)
class Context:
    """What a plugin may know about a request beside its content."""

    request_id: str
    principal: Principal
    dialect: Dialect
    state: dict[str, Any] = field(
        default_factory=dict[str, Any]
    )  # a plugin's own notes for this request


class RequestFilter(Protocol):
    """Sees every request once, before routing, on every endpoint and for batch lines. Returns the request to use.

    Raise `InvalidRequest` or `PermissionDenied` to refuse it.
    """

    async def apply(self, request: Request, context: Context) -> Request: ...


class StreamTransform(Protocol):
    """Sees every event of one answer, streamed or collected. Built per request, so it may keep state."""

    def feed(self, events: list[Event]) -> list[Event]:
        """Events to pass on instead. May hold text back, but then must release it in `flush`."""
        ...

    def flush(self) -> list[Event]:
        """Called once before the answer's `Finished` and `Usage` events: what was held back."""
        ...


TransformFactory = Callable[[Request, Context], StreamTransform | None]
"""Returns None where it has nothing to do for this request; then bytes may pass untouched."""


# -- After the answer ------------------------------------------------------------------------------------------------


class UsageRecord(Struct, frozen=True, omit_defaults=True):
    """One row per request, on every way out. Times are milliseconds; None = did not come to that."""

    request_id: str
    principal: str
    dialect: str
    model: str
    target: str  # "provider/upstream model" that answered or was tried last; "" = none
    status: int  # as the client saw it; 499 = the client left
    outcome: str  # "ok" | "error" | "cancelled" | "rejected"
    stream: bool
    klass: str
    attempts: int
    usage: Usage
    started_at_s: float  # wall clock
    ttft_ms: float | None
    duration_ms: float
    error_code: str = ""


class Observer(Protocol):
    """Told about every finished request, off the request's path, from a bounded queue."""

    async def on_usage(self, record: UsageRecord) -> None: ...


# -- Stages that the gateway fills itself, and later plugins may -----------------------------------------------------


class Lease(Protocol):
    """A reservation under the limits. Exactly one of the two is called, once, on every way out."""

    def settle(self, usage: Usage) -> None: ...

    def refund(self) -> None: ...


class Limiter(Protocol):
    async def reserve(self, principal: Principal, request: Request) -> Lease:
        """Raises RateLimited or QuotaExceeded, with Retry-After where waiting helps; then nothing is held."""
        ...


class ResponseCache(Protocol):
    """Whole answers, asked for after the filters and before a provider is chosen."""

    @property
    def enabled(self) -> bool:
        """False: nothing is asked or kept, and answers may pass as bytes."""
        ...

    async def get(self, request: Request, principal: Principal) -> list[Event] | None:
        """A whole answer, `Usage` and `Finished` included, or None. Must not raise: a cache that fails has nothing."""
        ...

    async def put(self, request: Request, principal: Principal, events: list[Event]) -> None:
        """Called once for each answer that came to its end, with all that the client was sent. Must not raise."""
        ...
