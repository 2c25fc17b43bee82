"""The in-repo engine as a provider: `type = "engine"`. Lives in the gateway, so nothing here imports torch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import suppress

from backend import launch
from backend.answer import Answer
from backend.answer_vectors import EmbeddingsAnswer
from backend.connection import Mailbox, Replica, Reply
from backend.engine.params import Objective, RequestClass
from backend.options import parse_options
from backend.protocol import Generate
from backend.request import to_generate
from plugins.errors import UpstreamTimeout, UpstreamUnavailable
from plugins.events import Dialect, Event, Request
from plugins.hookspecs import hookimpl
from plugins.interfaces import (
    Call,
    ProcessSpec,
    Provider,
    ProviderSettings,
    ProviderType,
    Runtime,
    Timeout,
)

AnyAnswer = Answer | EmbeddingsAnswer
CHARS_PER_TOKEN = 4  # only to compare replicas
UNKNOWN_OUTPUT_TOKENS = 256


class EngineType:
    name = "engine"
    default_base_url = ""

    def check(self, settings: ProviderSettings) -> list[str]:
        return launch.setting_faults(settings)

    def prepare(self, settings: ProviderSettings, runtime: Runtime) -> None:
        launch.fetch_model(settings, runtime)

    def processes(self, settings: ProviderSettings, runtime: Runtime) -> list[ProcessSpec]:
        return launch.worker_processes(settings, runtime)

    def build(self, settings: ProviderSettings, runtime: Runtime) -> Provider:
        replicas = [
            Replica(f"{settings.name}/{i}", launch.socket_path(settings.name, runtime, i))
            for i in range(parse_options(settings.engine).replicas)
        ]
        return EngineProvider(settings.name, replicas, settings.timeout)


class EngineProvider:
    """Streams from whichever replica has the least work outstanding."""

    dialects: frozenset[Dialect] = frozenset()  # answers are events, never bytes of a dialect
    embeds = True

    def __init__(self, name: str, replicas: list[Replica], timeout: Timeout) -> None:
        self.name = name
        self._replicas = replicas
        self._timeout = timeout
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        self._tasks = [asyncio.create_task(replica.run()) for replica in self._replicas]

    async def aclose(self) -> None:
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with suppress(asyncio.CancelledError):
                await task
        self._tasks = []

    def ready(self) -> bool:
        return any(replica.ready is not None for replica in self._replicas)

    def stats(self) -> Mapping[str, float]:
        """Sums over the replicas that are connected; empty while none is."""
        known = [replica.stats for replica in self._replicas if replica.stats is not None]
        if not known:
            return {}
        gauges = {name: float(sum(getattr(s, field) for s in known)) for name, field in _GAUGES}
        for klass in RequestClass:
            for state in ("running", "waiting"):
                counts = [getattr(s, f"{state}_by_class")[klass] for s in known]
                gauges[f"requests_{state}_{klass.name.lower()}"] = float(sum(counts))
        return gauges

    async def stream(self, request: Request, call: Call) -> AsyncGenerator[list[Event], None]:
        """See `plugins.interfaces.Provider.stream`."""
        objective = Objective(call.objective.ttft_ms, call.objective.tpot_ms)
        generate = to_generate(request, call.tenant, objective)
        replica = self._choose()
        assert replica.ready is not None
        kind = EmbeddingsAnswer if request.dialect == "embeddings" else Answer
        answer = kind(request, call.upstream_model, replica.ready)
        mailbox = replica.open(generate, _cost_tokens(generate))
        started_s = asyncio.get_running_loop().time()
        try:
            while not answer.done:
                if events := answer.read(await self._next(mailbox, answer, started_s)):
                    yield events
        finally:
            replica.close(mailbox, abort=not answer.done)

    async def _next(self, mailbox: Mailbox, answer: AnyAnswer, started_s: float) -> list[Reply]:
        deadline_s, what = self._deadline(started_s, answer)
        try:
            replies = await mailbox.get(deadline_s)
        except TimeoutError:
            raise UpstreamTimeout(f"the engine {self.name} {what}") from None
        if not replies:
            raise UpstreamUnavailable(f"the engine {self.name} stopped during the answer")
        return replies

    def _deadline(self, started_s: float, answer: AnyAnswer) -> tuple[float, str]:
        """When the next message must be there, and what it means when it is not."""
        timeout = self._timeout
        total = started_s + timeout.total_s, f"took more than {timeout.total_s:g} s"
        if isinstance(answer, EmbeddingsAnswer):  # nobody sees a part of it
            return total
        if not answer.has_content:
            text = f"gave no content within {timeout.first_token_s:g} s"
            return min((started_s + timeout.first_token_s, text), total)
        now_s = asyncio.get_running_loop().time()
        return min((now_s + timeout.idle_s, f"was silent for {timeout.idle_s:g} s"), total)

    def _choose(self) -> Replica:
        up = [replica for replica in self._replicas if replica.ready is not None]
        if not up:
            raise UpstreamUnavailable(
                f"the engine {self.name} is starting", status=503, retry_after_s=1
            )
        return min(up, key=lambda replica: replica.outstanding_tokens)


_GAUGES = (
    ("kv_blocks", "num_blocks"),
    ("kv_blocks_free", "num_free_blocks"),
    ("requests_running", "num_running"),
    ("requests_waiting", "num_waiting"),
    ("preemptions", "num_preemptions"),
    ("evictions", "num_evictions"),
    ("cached_tokens", "num_cached_tokens"),
    ("prompt_tokens", "num_prompt_tokens"),
    ("output_tokens", "num_output_tokens"),
    ("draft_tokens", "num_draft_tokens"),
    ("accepted_tokens", "num_accepted_tokens"),
)


def _cost_tokens(generate: Generate) -> int:
    """A guess at prompt and output tokens; exact numbers are the worker's, after the choice is made."""
    if generate.messages is not None:
        num_chars, num_prompts = sum(len(m["content"]) for m in generate.messages), 1
    else:
        num_chars, num_prompts = sum(map(len, generate.prompts)), len(generate.prompts)
    if generate.embedding is not None:
        return num_chars // CHARS_PER_TOKEN
    num_rows = generate.rows_per_prompt * num_prompts
    num_output = (generate.params.max_tokens or UNKNOWN_OUTPUT_TOKENS) * num_rows
    return num_chars // CHARS_PER_TOKEN + num_output


@hookimpl
def register_provider_types(register: Callable[[ProviderType], None]) -> None:
    register(EngineType())
