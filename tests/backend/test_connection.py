"""The gateway's side of the socket, when what sits at the other end is no worker any more."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import anyio
import pytest

from backend.client import EngineProvider
from backend.connection import Replica
from backend.protocol import MAX_FRAME_BYTES, Accepted, Delta, Deltas, Hello, Ready, encode_frame
from plugins.errors import UpstreamUnavailable
from plugins.events import Message, Request, Text
from plugins.interfaces import Call, Timeout

pytestmark = pytest.mark.anyio
HELLO_BYTES = len(encode_frame(Hello()))
READY = bytes(encode_frame(Ready("m", "f", 100, 10, 10)))
ANSWER = bytes(encode_frame(Accepted(1, 3))) + bytes(
    encode_frame(Deltas([Delta(1, 0, "hi", 1, 0), Delta(1, 0, "!", 2, 0)]))
)


class Babbler(asyncio.Protocol):
    """Greets, says `speech` to the first request of all its connections, and nothing to any later one."""

    def __init__(self, speech: list[bytes]) -> None:
        self._speech = speech
        self._num_received = 0
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.write(READY)

    def data_received(self, data: bytes) -> None:
        self._num_received += len(data)
        if self._num_received > HELLO_BYTES and self._speech and self.transport:
            self.transport.write(self._speech.pop())


@asynccontextmanager
async def answered_with(folder: Path, speech: bytes) -> AsyncGenerator[EngineProvider, None]:
    said, talks = [speech], list[Babbler]()

    def talk() -> Babbler:
        talks.append(Babbler(said))
        return talks[-1]

    loop = asyncio.get_running_loop()
    server = await loop.create_unix_server(talk, folder / "w.sock")
    provider = EngineProvider("local", [Replica("local/0", folder / "w.sock")], Timeout())
    await provider.start()
    await ready(provider)
    yield provider
    await provider.aclose()
    server.close()
    for connection in talks:
        if connection.transport:
            connection.transport.abort()
    await anyio.sleep(0)  # transports close in the next turn


async def ready(provider: EngineProvider) -> None:
    with anyio.fail_after(30):
        while not provider.ready():
            await anyio.sleep(0.002)


async def ends_unavailable(provider: EngineProvider) -> None:
    request = Request("r", "chat", "m", [Message("user", [Text("hi")])])
    with anyio.fail_after(30), pytest.raises(UpstreamUnavailable):
        async for _ in provider.stream(request, Call("m")):
            pass


@pytest.mark.parametrize("seed", range(20))
async def test_a_stream_with_wrong_bytes_ends_in_one_error_and_the_worker_is_met_again(
    tmp_path: Path, seed: int
) -> None:
    """The junk stands at the end, with a length of its own that is too large."""
    rng = random.Random(seed)
    speech = ANSWER[: rng.choice([0, len(ANSWER), len(bytes(encode_frame(Accepted(1, 3))))])]
    speech += rng.choice([b"\xff\xff\xff\xff", b"\0\0\0\4junk", b"\0\0\0\0", b"\0\0\0\1\xc1"])
    async with answered_with(tmp_path, speech + rng.randbytes(rng.randint(0, 50))) as provider:
        await ends_unavailable(provider)
        await ready(provider)


async def test_a_length_over_the_limit_is_not_waited_for(tmp_path: Path) -> None:
    async with answered_with(tmp_path, (MAX_FRAME_BYTES + 1).to_bytes(4, "big")) as provider:
        await ends_unavailable(provider)
        await ready(provider)
