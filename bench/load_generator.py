"""Closed-loop load on a chat endpoint, and one line of JSON about it. Raw asyncio protocol; about 60 us a request.

    load_generator.py -u 127.0.0.1:8080 -c 64 -d 3 -w 1 [-s -k 64 -D 20000 -j 1.28] [-B 900] [-H 'authorization: ...']

-c connections, each asks again when its answer is whole; -d seconds are measured after -w seconds; -s streams of
-k chunks, one each -D us; -j spreads the first requests over so many seconds; -B bytes of filler in the prompt. Keys of
the answer: `rps`, `chunks_s`, `lat_us`, `ttft_us`, `chunk_us` (from the stamp of fake_upstream.py to here), `err`,
`non2xx`, `st` (answers by hundreds of status, warm-up included).
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

_STAMP = re.compile(rb"@T(\d{19})")
_FILLER = "the quick brown fox jumps over the lazy dog "


class Tally:
    """What was measured between `begin_ns` and `end_ns`."""

    def __init__(self, warm_s: float, duration_s: float) -> None:
        self.begin_ns = time.monotonic_ns() + int(warm_s * 1e9)
        self.end_ns = self.begin_ns + int(duration_s * 1e9)
        self.statuses = [0] * 6
        self.errors = 0
        self.lat_ns: list[int] = []
        self.ttft_ns: list[int] = []
        self.chunk_ns: list[int] = []

    def counts(self, now_ns: int) -> bool:
        return self.begin_ns <= now_ns < self.end_ns

    def result(self, concurrency: int) -> dict[str, object]:
        wall_s = (self.end_ns - self.begin_ns) / 1e9
        chunks = len(self.chunk_ns)
        return {
            "c": concurrency,
            "wall_s": wall_s,
            "done": len(self.lat_ns),
            "rps": len(self.lat_ns) / wall_s,
            "chunks": chunks,
            "chunks_s": chunks / wall_s,
            "err": self.errors,
            "non2xx": sum(self.statuses) - self.statuses[2],
            "st": self.statuses[1:],
            "lat_us": _spread_us(self.lat_ns),
            "ttft_us": _spread_us(self.ttft_ns),
            "chunk_us": _spread_us(self.chunk_ns),
        }


def _spread_us(values_ns: list[int]) -> dict[str, float]:
    ordered = sorted(values_ns) or [0]
    at = {f"p{q}": ordered[min(len(ordered) - 1, len(ordered) * q // 100)] for q in (50, 95, 99)}
    return {"n": len(values_ns), **{name: value / 1e3 for name, value in at.items()}}


class Client(asyncio.Protocol):
    def __init__(self, request: bytes, tally: Tally) -> None:
        self.request = request
        self.tally = tally

    def connection_made(self, transport: asyncio.BaseTransport) -> None:

        self.transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass
        self._ask()

    def connection_lost(self, exc: Exception | None) -> None:
        if time.monotonic_ns() < self.tally.end_ns:
            self.tally.errors += 1

    def _ask(self) -> None:
        self.parser = httptools.HttpResponseParser(self)
        self.has_begun = False
        self.is_whole = False
        self.asked_ns = time.monotonic_ns()
        self.transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        now_ns = time.monotonic_ns()
        counts = self.tally.counts(now_ns)
        stamps = _STAMP.findall(data)
        if counts:
            self.tally.chunk_ns += [now_ns - int(stamp) for stamp in stamps]
        if stamps and not self.has_begun:
            self.has_begun = True
            if counts:
                self.tally.ttft_ns.append(now_ns - self.asked_ns)
        self.parser.feed_data(data)
        if self.is_whole:
            self.tally.statuses[min(self.parser.get_status_code() // 100, 5)] += 1
            if counts:
                self.tally.lat_ns.append(now_ns - self.asked_ns)
            self._ask()

    def on_message_complete(self) -> None:
        self.is_whole = True


def _request(args: argparse.Namespace) -> bytes:
    filler = (_FILLER * (args.filler_bytes // len(_FILLER) + 1))[: args.filler_bytes]
    body = {
        "model": args.model,
        "messages": [
            {"role": "system", "content": "You are a helpful assistant."},
            {
                "role": "user",
                "content": f"mock:chunks={args.chunks}&delay_us={args.delay_us} {filler}",
            },
        ],
        "max_tokens": args.chunks,
        "stream": args.stream,
    }
    data = json.dumps(body).encode()
    lines = [
        f"POST {args.path} HTTP/1.1",
        f"host: {args.address}",
        "content-type: application/json",
        *args.header,
        f"content-length: {len(data)}",
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


async def run(args: argparse.Namespace) -> dict[str, object]:
    host, _, port = args.address.rpartition(":")
    tally = Tally(args.warm_s, args.duration_s)
    request = _request(args)
    loop = asyncio.get_running_loop()

    async def connect(number: int) -> Client:
        await asyncio.sleep(args.ramp_s * number / args.concurrency)
        return (await loop.create_connection(lambda: Client(request, tally), host, int(port)))[1]

    clients = asyncio.gather(*(connect(number) for number in range(args.concurrency)))
    await asyncio.sleep(max(0.0, (tally.end_ns - time.monotonic_ns()) / 1e9))
    for client in await clients:
        client.transport.abort()
    return tally.result(args.concurrency)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("-u", dest="address", required=True)
    add("-p", dest="path", default="/v1/chat/completions")
    add("-m", dest="model", default="mock-model")
    add("-c", dest="concurrency", type=int, default=1)
    add("-d", dest="duration_s", type=float, default=3)
    add("-w", dest="warm_s", type=float, default=1)
    add("-s", dest="stream", action="store_true")
    add("-k", dest="chunks", type=int, default=64)
    add("-D", dest="delay_us", type=int, default=0)
    add("-j", dest="ramp_s", type=float, default=0)
    add("-B", dest="filler_bytes", type=int, default=900)
    add("-H", dest="header", action="append", default=[])
    print(json.dumps(uvloop.run(run(parser.parse_args()))))


if __name__ == "__main__":
    main()
