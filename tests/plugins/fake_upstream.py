"""An HTTP server that plays scripts: byte by byte, cut, reset, hanging, talkative. It speaks raw TCP on purpose."""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
from dataclasses import dataclass, field
from typing import Any

import msgspec


@dataclass
class Action:
    """What a script does beside writing."""

    name: str


CUT = Action("cut")  # close the connection as it is
RESET = Action("reset")  # RST
HANG = Action("hang")  # silent until the client goes away
Step = bytes | Action | asyncio.Event


@dataclass
class Received:
    method: str
    target: str
    headers: dict[str, str]
    body: bytes
    connection: int

    @property
    def json(self) -> Any:
        return msgspec.json.decode(self.body)


@dataclass
class FakeUpstream:
    """`async with FakeUpstream(script, script, ...)`: one script per request, the last one again and again."""

    scripts: list[list[Step]]
    tls: ssl.SSLContext | None = None
    requests: list[Received] = field(default_factory=list[Received])
    num_connections: int = 0
    client_gone: asyncio.Event = field(default_factory=asyncio.Event)
    bytes_written: int = 0

    def __init__(self, *scripts: list[Step] | bytes, tls: ssl.SSLContext | None = None) -> None:
        self.scripts = [[script] if isinstance(script, bytes) else script for script in scripts]
        self.tls = tls
        self.requests = []
        self.num_connections = 0
        self.client_gone = asyncio.Event()
        self.bytes_written = 0
        self._writers: list[asyncio.StreamWriter] = []

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://127.0.0.1:{self.port}/v1"

    async def __aenter__(self) -> FakeUpstream:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self.tls)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.sleep(0.001)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self._writers.append(writer)
        number = self.num_connections
        try:
            while await self._one_request(reader, writer, number):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            self.client_gone.set()
        finally:
            writer.transport.abort()

    async def _one_request(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int
    ) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = head.rstrip("\r\n").split("\r\n")
        method, target, _ = first.split(" ")
        headers = {name.lower(): value for name, _, value in (x.partition(": ") for x in lines)}
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        script = self.scripts[min(len(self.requests), len(self.scripts) - 1)]
        self.requests.append(Received(method, target, headers, body, number))
        for step in script:
            if isinstance(step, bytes):
                await self._write(writer, step)
            elif isinstance(step, asyncio.Event):
                await step.wait()
            elif step is HANG:
                await reader.read(1)
                self.client_gone.set()
                return False
            else:
                if step is RESET:
                    linger = struct.pack("ii", 1, 0)
                    sock: socket.socket = writer.get_extra_info("socket")
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                else:
                    writer.close()
                return False
        return True

    async def _write(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        """One write, one packet: the reader's turn comes before the next."""
        writer.write(data)
        await writer.drain()
        self.bytes_written += len(data)
        for _ in range(2):
            await asyncio.sleep(0)


def answer(body: bytes | str, status: int = 200, **headers: str) -> bytes:
    """A whole answer with its length; header names take "_" for "-"."""
    body = body.encode() if isinstance(body, str) else body
    lines = [f"HTTP/1.1 {status} X", f"content-length: {len(body)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + body


def json_answer(value: Any, status: int = 200, **headers: str) -> bytes:
    headers = {"content_type": "application/json", **headers}
    return answer(msgspec.json.encode(value), status, **headers)


def head(status: int = 200, **headers: str) -> bytes:
    """Status and headers of a chunked answer."""
    headers = {"transfer_encoding": "chunked", **headers}
    lines = [f"HTTP/1.1 {status} X"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


LAST_CHUNK = b"0\r\n\r\n"


def one_byte_writes(data: bytes) -> list[Step]:
    return [data[i : i + 1] for i in range(len(data))]
