"""How the tests run the openai_compatible provider against a fake upstream."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import msgspec
import pytest

from plugins.errors import UpstreamError
from plugins.events import Event, Message, Request, Text
from plugins.interfaces import Call, ProviderSettings
from plugins.providers.openai_compatible import OpenAICompatible
from plugins.secrets import Secret
from tests.plugins.fake_upstream import (
    LAST_CHUNK,
    Step,
    head,
    json_answer,
)
from tests.plugins.fake_upstream import chunk as http_chunk
from tests.plugins.openai_answers import body

KEY = "sk-upstream-secret"
OK = json_answer(body({"content": "ok"}))
NOW = 1_800_000_000.0


@asynccontextmanager
async def open_provider(base_url: str, **settings: Any) -> AsyncGenerator[OpenAICompatible, None]:
    defaults: dict[str, Any] = {"name": "up", "type": "openai_compatible", "api_key": Secret(KEY)}
    provider = OpenAICompatible(
        ProviderSettings(base_url=base_url, **{**defaults, **settings}), wall_clock=lambda: NOW
    )
    await provider.start()
    try:
        yield provider
    finally:
        await provider.aclose()


def chat(stream: bool = False, **fields: Any) -> Request:
    document = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": stream}
    return Request(
        "req_1",
        "chat",
        "m",
        messages=[Message("user", [Text("hi")])],
        stream=stream,
        body=msgspec.json.encode({**document, **fields}),
    )


VERBATIM, READ = Call("up-model", verbatim=True), Call("up-model")


async def collect(
    provider: OpenAICompatible, request: Request, call: Call = VERBATIM
) -> list[Event]:
    events: list[Event] = []
    async with aclosing(provider.stream(request, call)) as batches:
        async for batch in batches:
            assert batch
            events += batch
    return events


async def fail(provider: OpenAICompatible, request: Request) -> tuple[list[Event], UpstreamError]:
    """What came before the failure, and the failure."""
    events: list[Event] = []
    with pytest.raises(UpstreamError) as caught:
        async with aclosing(provider.stream(request, VERBATIM)) as batches:
            async for batch in batches:
                events += batch
    return events, caught.value


def stream_answer(*pieces: bytes, end: Step = LAST_CHUNK) -> list[Step]:
    return [head(content_type="text/event-stream"), *[http_chunk(p) for p in pieces], end]
