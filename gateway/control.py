"""What the supervisor tells a gateway worker, over the worker's standard input.

Frames are a length (4 bytes, big-endian) and that many bytes of msgpack. The first frame starts the worker, each later
one brings a reloaded config. The pipe stays open: its end means that the supervisor is gone, and the worker drains.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import msgspec

from gateway.config import Config, parse_config

MAX_FRAME_BYTES = 64 * 2**20
_LENGTH_BYTES = 4


class ConfigSource(msgspec.Struct, frozen=True):
    """A config as text, so that supervisor and workers check the same one, whatever happens to the file meanwhile."""

    text: str
    path: str
    overrides: dict[str, dict[str, Any]] = {}

    def parse(self) -> Config:
        """Raises ConfigFaults."""
        return parse_config(self.text, Path(self.path), self.overrides)


class WorkerOrder(msgspec.Struct, frozen=True):
    """`listen_fd` is an inherited listening socket; `store_url` is that of the embedded store or of the config."""

    config: ConfigSource
    listen_fd: int
    store_url: str
    run_dir: str


def encode_frame(order: WorkerOrder) -> bytes:
    body = msgspec.msgpack.encode(order)
    return len(body).to_bytes(_LENGTH_BYTES, "big") + body


def read_first_order(fd: int) -> WorkerOrder | None:
    """Blocking, and never a byte more than the frame. None: the pipe ended before."""
    head = _read_exactly(fd, _LENGTH_BYTES)
    body = None if head is None else _read_exactly(fd, int.from_bytes(head, "big"))
    return None if body is None else msgspec.msgpack.decode(body, type=WorkerOrder)


def _read_exactly(fd: int, size: int) -> bytes | None:
    data = b""
    while len(data) < size:
        more = os.read(fd, size - len(data))
        if not more:
            return None
        data += more
    return data


class OrderReader:
    """The later frames, read in the event loop."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._stream = asyncio.StreamReader(limit=MAX_FRAME_BYTES)

    async def open(self) -> None:
        loop = asyncio.get_running_loop()
        pipe = os.fdopen(self._fd, "rb", buffering=0)
        protocol = asyncio.StreamReaderProtocol(self._stream)
        await loop.connect_read_pipe(lambda: protocol, pipe)

    async def next(self) -> WorkerOrder | None:
        """None: the supervisor is gone."""
        try:
            head = await self._stream.readexactly(_LENGTH_BYTES)
            body = await self._stream.readexactly(int.from_bytes(head, "big"))
        except asyncio.IncompleteReadError:
            return None
        return msgspec.msgpack.decode(body, type=WorkerOrder)
