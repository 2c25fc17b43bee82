"""A provider type for tests: says "one", then waits until the file `options.gate` is there, then says "two"."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path

from plugins.events import Event, Finished, Request, Started, TextDelta, Usage
from plugins.hookspecs import hookimpl
from plugins.interfaces import Call, ProcessSpec, ProviderSettings, Runtime


class GatedProvider:
    dialects = frozenset()

    def __init__(self, name: str, gate: Path) -> None:
        self.name = name
        self._gate = gate

    async def start(self) -> None: ...

    async def aclose(self) -> None: ...

    def ready(self) -> bool:
        return True

    async def stream(self, request: Request, call: Call) -> AsyncGenerator[list[Event], None]:
        yield [Started(id="chatcmpl-1", model="x", created_s=1), TextDelta("one ")]
        while not self._gate.exists():
            await asyncio.sleep(0.01)
        yield [TextDelta("two"), Finished("stop"), Usage(3, 2)]

    def stats(self) -> Mapping[str, float]:
        return {}


class GatedType:
    name = "gated"
    default_base_url = ""

    def check(self, settings: ProviderSettings) -> list[str]:
        return [] if "gate" in settings.options else ["options.gate: required"]

    def prepare(self, settings: ProviderSettings, runtime: Runtime) -> None: ...

    def processes(self, settings: ProviderSettings, runtime: Runtime) -> list[ProcessSpec]:
        return []

    def build(self, settings: ProviderSettings, runtime: Runtime) -> GatedProvider:
        return GatedProvider(settings.name, Path(settings.options["gate"]))


@hookimpl
def register_provider_types(register):
    register(GatedType())
