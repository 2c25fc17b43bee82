"""A raw client of one server connection, over a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

import uvicorn
from starlette.types import Receive, Scope, Send

from gateway.http_protocol import ServerConnection

App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    def send(self, data: bytes) -> None:
        self._writer.write(data)

    async def until_closed(self) -> bytes:
        """All that comes until the server ends the connection; b"" when it does so while we still send."""
        try:
            return await self._reader.read()
        except ConnectionResetError:
            return b""

    async def head(self) -> bytes:
        return await self._reader.readuntil(b"\r\n\r\n")

    async def answer(self) -> bytes:
        head = await self.head()
        length = int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
        return await self._reader.readexactly(length)

    async def close(self) -> None:
        self._writer.transport.abort()


@asynccontextmanager
async def connected(app: App) -> AsyncGenerator[Client, None]:
    config = uvicorn.Config(app, http=ServerConnection, lifespan="off", log_config=None)
    state = uvicorn.server.ServerState()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: ServerConnection(config, state, {}), "127.0.0.1", 0)
    client = Client(*await asyncio.open_connection(*server.sockets[0].getsockname()))
    try:
        yield client
    finally:
        await client.close()
        server.close()
        await asyncio.gather(*state.tasks)
        while state.connections:
            await asyncio.sleep(0)


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    body, more = b"", True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body += message.get("body", b"")
        more = message.get("more_body", False)
    await answer(send, b"got " + body)


async def answer(send: Send, body: bytes) -> None:
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})
