"""For tests of plugins and of the gateway itself: a provider that plays a script, and a clock that tests turn."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence

import anyio

from plugins.events import Dialect, Event, Finished, Request, Started, TextDelta, Usage
from plugins.interfaces import Call

Step = list[Event] | Exception | anyio.Event
"""A batch to yield, an error to raise, or an event to wait for."""


class VirtualClock:
    """Seconds that pass only when a test says so; `sleep` moves them on."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s
        self.slept_s: list[float] = []

    def __call__(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        self.now_s += seconds
        await anyio.lowlevel.checkpoint()


def answer(text: str, *, prompt_tokens: int = 3, completion_tokens: int = 2) -> list[Event]:
    """A whole, well-formed answer of one choice in one batch."""
    return [
        Started("chatcmpl-1", "scripted", 1_700_000_000),
        TextDelta(text),
        Finished("stop"),
        Usage(prompt_tokens=prompt_tokens, completion_tokens=completion_tokens),
    ]


class ScriptedProvider:
    """Plays one list of steps per request, the last one again and again. Keeps what it was asked."""

    def __init__(
        self,
        name: str,
        *scripts: Sequence[Step],
        dialects: frozenset[Dialect] = frozenset[Dialect](),
        embeds: bool = False,
    ) -> None:
        self.name = name
        self.embeds = embeds
        self.dialects = dialects
        self.calls: list[tuple[Request, Call]] = []
        self.open_streams = 0
        self.is_ready = True
        self._scripts = scripts

    async def start(self) -> None: ...

    async def aclose(self) -> None: ...

    def ready(self) -> bool:
        return self.is_ready

    def stats(self) -> Mapping[str, float]:
        return {}

    async def stream(self, request: Request, call: Call) -> AsyncGenerator[list[Event], None]:
        script = self._scripts[min(len(self.calls), len(self._scripts) - 1)]
        self.calls.append((request, call))
        self.open_streams += 1
        try:
            for step in script:
                if isinstance(step, Exception):
                    raise step
                if isinstance(step, anyio.Event):
                    await step.wait()
                else:
                    yield step
        finally:
            self.open_streams -= 1
