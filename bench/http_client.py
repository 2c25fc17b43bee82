"""CPU time of the HTTP client and of the openai_compatible provider, per request and per streamed chunk.

    python bench/http_client.py [--requests 20000] [--in-flight 64] [--chunks 100]

A fake upstream runs in a process of its own and answers at once; what is measured is the CPU time (user and system) of
this process, so another job on the machine disturbs it little. "paced" sends one chunk per stream every 20 ms, as a
model does; "flood" sends all at once, and then one read holds many.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import socket
import time
from collections.abc import Awaitable, Callable
from multiprocessing.synchronize import Event
from typing import cast

import uvloop

from plugins.events import Request
from plugins.interfaces import Call, ProviderSettings, Timeout
from plugins.providers.http_client import HTTPClient
from plugins.providers.http_message import parse_base_url
from plugins.providers.openai_compatible import OpenAICompatible

HEAD = '{"id":"chatcmpl-1","object":"chat.completion.chunk","created":1700000000,"model":"m",'
CHOICE = {
    "index": 0,
    "message": {"role": "assistant", "content": "x" * 800},
    "finish_reason": "stop",
}
USAGE = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
ANSWER = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1_700_000_000, "model": "m"}
BODY = json.dumps({**ANSWER, "choices": [CHOICE], "usage": USAGE}).encode()
PIECE = HEAD + '"choices":[{"index":0,"delta":%s,"finish_reason":%s}]}'
REQUEST = b'{"model":"m","messages":[{"role":"user","content":"%s"}]%s}'


def sse_chunk(delta: str, finish: str = "null") -> bytes:
    event = f"data: {PIECE % (delta, finish)}\n\n".encode()
    return b"%x\r\n%b\r\n" % (len(event), event)


class Upstream(asyncio.Protocol):
    """Answers at once: the body, or a stream in the way that the path asks for."""

    whole = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
        len(BODY),
        BODY,
    )
    head = (
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    first = sse_chunk('{"role":"assistant","content":""}')
    piece = sse_chunk('{"content":" token"}')
    last = sse_chunk("{}", '"stop"') + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"

    def __init__(self, num_chunks: int) -> None:
        self.num_chunks = num_chunks
        self.received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.received += data
        head, end, body = self.received.partition(b"\r\n\r\n")
        if not end:
            return
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        if len(body) < length:
            return
        self.received = b""
        if b'"stream":true' not in body:
            self.transport.write(self.whole)
        elif b"flood" in body:
            self.transport.write(self.head + self.first + self.piece * self.num_chunks + self.last)
        else:
            self.transport.write(self.head + self.first)
            self.pace(self.num_chunks)

    def pace(self, left: int) -> None:
        if self.transport.is_closing():
            return
        self.transport.write(self.piece if left else self.last)
        if left:
            asyncio.get_running_loop().call_later(0.02, self.pace, left - 1)


def serve(sock: socket.socket, num_chunks: int, ready: Event) -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        await loop.create_server(lambda: Upstream(num_chunks), sock=sock)
        ready.set()
        await asyncio.Event().wait()

    uvloop.run(run())


async def in_parallel(one: Callable[[], Awaitable[object]], total: int, in_flight: int) -> float:
    """CPU microseconds for each call of `one`."""

    async def lane() -> None:
        for _ in range(total // in_flight):
            await one()

    started = time.process_time()
    await asyncio.gather(*(lane() for _ in range(in_flight)))
    return (time.process_time() - started) / (total // in_flight * in_flight) * 1e6


def chat(words: bytes, stream: bool) -> Request:
    body = REQUEST % (words, b',"stream":true' if stream else b"")
    return Request("req_1", "chat", "m", stream=stream, body=body)


async def bench(url: str, num_requests: int, in_flight: int, num_chunks: int) -> None:
    client = HTTPClient("up", parse_base_url(url), Timeout())
    provider = OpenAICompatible(ProviderSettings("up", "openai_compatible", url))
    await provider.start()
    whole = REQUEST % (b"x" * 900, b"")

    async def plain() -> None:
        response = await client.request("POST", "/chat/completions", b"", whole)
        await response.read(1 << 20)
        response.close()

    async def streamed(words: bytes) -> None:
        body = REQUEST % (words, b',"stream":true')
        response = await client.request("POST", "/chat/completions", b"", body)
        while await response.next():
            response.progressed()
        response.close()

    def provided(words: bytes, stream: bool, verbatim: bool) -> Callable[[], Awaitable[object]]:
        request, call = chat(words, stream), Call(words.decode(), verbatim=verbatim)

        async def one() -> None:
            async for _ in provider.stream(request, call):
                pass

        return one

    async def report(name: str, one: Callable[[], Awaitable[object]], per: int, total: int) -> None:
        await in_parallel(one, in_flight, in_flight)  # connections open, code warm
        samples = sorted([await in_parallel(one, total, in_flight) / per for _ in range(3)])
        print(f"{name:44} {samples[1]:7.1f}  ({samples[0]:.1f}-{samples[2]:.1f})")

    streams = in_flight * 2
    text = b"x" * 900
    print(f"{'CPU us, median of 3 (range)':44} {in_flight} in flight, uvloop")
    await report("client, request of 1 kB", plain, 1, num_requests)
    await report("client, paced chunk", lambda: streamed(b"paced"), num_chunks, streams)
    await report("client, flooded chunk", lambda: streamed(b"flood"), num_chunks, streams)
    await report("provider, verbatim request", provided(text, False, True), 1, num_requests)
    await report("provider, request as events", provided(text, False, False), 1, num_requests)
    for words in (b"paced", b"flood"):
        for verbatim in (True, False):
            name = f"provider, {words.decode()} chunk {'verbatim' if verbatim else 'as events'}"
            await report(name, provided(words, True, verbatim), num_chunks, streams)
    await client.aclose()
    await provider.aclose()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--in-flight", type=int, default=64)
    parser.add_argument("--chunks", type=int, default=100)
    args = parser.parse_args()
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    ready = multiprocessing.Event()
    upstream = multiprocessing.Process(target=serve, args=(sock, args.chunks, ready), daemon=True)
    upstream.start()
    ready.wait()
    try:
        uvloop.run(bench(url, args.requests, args.in_flight, args.chunks))
    finally:
        upstream.terminate()
        upstream.join()


if __name__ == "__main__":
    main()
