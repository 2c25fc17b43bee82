"""Speaks ASGI to an app in the same event loop: whole answers, streams piece by piece, and leaving early."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message


@dataclass
class Answer:
    """What came so far."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict[str, str])
    body: bytes = b""
    done: bool = False

    def json(self) -> Any:
        return json.loads(self.body)


class Exchange:
    """One request under way."""

    def __init__(self, app: ASGIApp, scope: dict[str, Any], body: list[bytes]) -> None:
        self.answer = Answer()
        self._pieces = body
        self._gone = asyncio.Event()
        self._news = asyncio.Event()
        self.task = asyncio.ensure_future(app(scope, self._receive, self._send))

    async def _receive(self) -> Message:
        if self._pieces:
            piece = self._pieces.pop(0)
            return {"type": "http.request", "body": piece, "more_body": bool(self._pieces)}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.answer.status = message["status"]
            self.answer.headers = {k.decode(): v.decode() for k, v in message["headers"]}
        else:
            self.answer.body += message.get("body", b"")
            self.answer.done = not message.get("more_body", False)
        self._news.set()

    async def some(self) -> Answer:
        """Wait for one more piece of the answer."""
        await self._news.wait()
        self._news.clear()
        return self.answer

    def leave(self) -> None:
        self._gone.set()


@asynccontextmanager
async def exchange(
    app: ASGIApp,
    path: str = "/",
    body: Any = b"",
    *,
    method: str = "POST",
    headers: dict[str, str] | None = None,
) -> AsyncGenerator[Exchange, None]:
    """`body`: bytes, a list of pieces, or a value that is sent as JSON."""
    pieces = body if isinstance(body, list) else [body if isinstance(body, bytes) else _json(body)]
    named = {"content-type": "application/json"} | (headers or {})
    scope: dict[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "scheme": "http",
        "headers": [(k.encode(), v.encode()) for k, v in named.items()],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
    }
    under_way = Exchange(app, scope, list(pieces))
    try:
        yield under_way
    finally:
        under_way.leave()
        await under_way.task


async def call(app: ASGIApp, path: str = "/", body: Any = b"", **fields: Any) -> Answer:
    async with exchange(app, path, body, **fields) as under_way:
        await under_way.task
        return under_way.answer


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()
