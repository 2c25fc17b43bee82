"""Ask our own /readyz until it says 200."""

from __future__ import annotations

import asyncio
from contextlib import suppress

POLL_S = 0.05
ANSWER_TIMEOUT_S = 5.0
_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


async def wait_until_ready(host: str, port: int) -> None:
    while not await is_ready(host, port):  # noqa: ASYNC110  the event is in another process
        await asyncio.sleep(POLL_S)


async def is_ready(host: str, port: int) -> bool:
    """Whether one new connection finds a worker that is ready."""
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            return await _status(_WILDCARDS.get(host, host), port) == 200
    except (OSError, TimeoutError, ValueError):
        return False


async def _status(host: str, port: int) -> int:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(b"GET /readyz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        head = await reader.readline()
        await reader.read()
        return int(head.split()[1]) if head.startswith(b"HTTP/1.") else 0
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
