"""A fake OpenAI upstream as raw asyncio protocol: `fake_upstream.py -p PORT`.

What it answers is told by the prompt, which passes through any gateway: `mock:chunks=64&delay_us=20000`. Each chunk of
a stream holds `@T` and the 19 digits of the monotonic clock in ns when it was written, so that a load generator on the
same machine can tell how long it was under way. The other answers are 1.1 kB of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import time
from typing import cast

import httptools
import uvloop

_ORDER = re.compile(rb"mock:chunks=(\d+)&delay_us=(\d+)")
_STREAM = re.compile(rb'"stream" *: *true')
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)
_CHUNK = {"id": "chatcmpl-fake", "object": "chat.completion.chunk", "created": 1700000000}


def _answer() -> bytes:
    body = json.dumps(
        {
            "id": "chatcmpl-fake",
            "object": "chat.completion",
            "created": 1700000000,
            "model": "fake",
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": "lorem ipsum dolor sit " * 36},
                    "finish_reason": "stop",
                }
            ],
            "usage": {"prompt_tokens": 12, "completion_tokens": 120, "total_tokens": 132},
        }
    ).encode()
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % len(body) + body


def _event(delta: dict[str, str], finish_reason: str | None) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
    chunk = {**_CHUNK, "model": "fake", "system_fingerprint": "fp", "choices": [choice]}
    return b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n"


def _framed(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


_ANSWER = _answer()
_FIRST = _framed(_event({"role": "assistant", "content": ""}, None))
_STAMP = b"0" * 19
_CONTENT_HEAD, _CONTENT_TAIL = _framed(_event({"content": f"lore@T{_STAMP.decode()}"}, None)).split(
    _STAMP
)
_LAST = _framed(_event({}, "stop")) + _framed(b"data: [DONE]\n\n") + b"0\r\n\r\n"


class FakeUpstream(asyncio.Protocol):
    def __init__(self) -> None:
        self.parser = httptools.HttpRequestParser(self)
        self.loop = asyncio.get_running_loop()
        self.body: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:

        self.transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_body(self, data: bytes) -> None:
        self.body.append(data)

    def on_message_complete(self) -> None:
        body = b"".join(self.body)
        self.body.clear()
        if not _STREAM.search(body):
            self.transport.write(_ANSWER)
            return
        order = _ORDER.search(body)
        chunks, delay_us = (int(order[1]), int(order[2])) if order else (64, 0)
        self.transport.write(_STREAM_HEAD + _FIRST)
        self._send_chunk(chunks, delay_us / 1e6, self.loop.time())

    def _send_chunk(self, left: int, delay_s: float, due: float) -> None:
        if self.transport.is_closing():
            return
        if not left:
            self.transport.write(_LAST)
            return
        self.transport.write(b"%b%019d%b" % (_CONTENT_HEAD, time.monotonic_ns(), _CONTENT_TAIL))
        due += delay_s
        self.loop.call_at(due, self._send_chunk, left - 1, delay_s, due)


async def serve(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(
        FakeUpstream, "127.0.0.1", port, backlog=4096
    )
    await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-p", type=int, required=True, dest="port")
    uvloop.run(serve(parser.parse_args().port))
