"""Closed-loop streaming load on `/v1/completions`, with the times that a reader of the stream sees."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import httptools
from bench_server import Server

# Words that are one token each to most tokenizers, so that a prompt of 128 words has about 128 tokens.
WORD_LIST = (
    "time river stone light paper house music green table water north field glass summer "
    "road bread winter story garden silver bridge window mountain letter number forest "
    "signal copper engine planet market doctor island"
)


def make_prompts(count: int, num_words: int, seed: str) -> list[str]:
    rng, words = random.Random(seed), WORD_LIST.split()
    return [" ".join(rng.choices(words, k=num_words)) for _ in range(count)]


@dataclass
class Answer:
    """Times are seconds of the monotonic clock."""

    sent_s: float
    token_times_s: list[float] = field(default_factory=list)
    num_tokens: int = 0
    prompt_tokens: int = 0
    error: str = ""

    @property
    def ttft_ms(self) -> float:
        return (self.token_times_s[0] - self.sent_s) * 1e3

    @property
    def tpot_ms(self) -> float:
        return (self.token_times_s[-1] - self.token_times_s[0]) * 1e3 / max(1, self.num_tokens - 1)


class _Exchange(asyncio.Protocol):
    """One request on a connection of its own."""

    def __init__(self, request: bytes) -> None:
        self.request = request
        self.parser = httptools.HttpResponseParser(self)
        self.rest = b""
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.answer = Answer(time.monotonic())

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.answer.sent_s = time.monotonic()
        self.transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.answer.error = "the connection broke"
            self.done.set_result(None)

    def on_body(self, data: bytes) -> None:
        *lines, self.rest = (self.rest + data).split(b"\n")
        if self.parser.get_status_code() != 200:
            self.answer.error = f"status {self.parser.get_status_code()}: {data[:200]!r}"
        for line in lines:
            event = line.removeprefix(b"data:").strip()
            if event != line.strip() and event != b"[DONE]":
                self._take(json.loads(event))

    def on_message_complete(self) -> None:
        if not self.done.done():
            self.done.set_result(None)

    def _take(self, event: dict[str, Any]) -> None:
        answer = self.answer
        if "error" in event:
            answer.error = str(event["error"])[:200]
        if any(choice.get("text") for choice in event.get("choices", ())):
            answer.token_times_s.append(time.monotonic())
            answer.num_tokens = max(answer.num_tokens, len(answer.token_times_s))
        if usage := event.get("usage"):
            answer.num_tokens = usage["completion_tokens"]
            answer.prompt_tokens = usage["prompt_tokens"]


def _request(server: Server, prompt: str, num_tokens: int, extra: dict[str, Any]) -> bytes:
    body = {"model": server.model, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0}
    data = json.dumps({**body, "stream": True, **extra}).encode()
    lines = [
        "POST /v1/completions HTTP/1.1",
        f"Host: 127.0.0.1:{server.port}",
        "Content-Type: application/json",
        *server.headers,
        f"Content-Length: {len(data)}",
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


async def ask(server: Server, request: bytes) -> Answer:
    loop = asyncio.get_running_loop()
    try:
        _, exchange = await loop.create_connection(
            lambda: _Exchange(request), "127.0.0.1", server.port
        )
    except OSError as exc:
        return Answer(time.monotonic(), error=str(exc))
    await exchange.done
    exchange.transport.abort()
    answer = exchange.answer
    if not answer.error and not answer.token_times_s:
        answer.error = "no text"
    return answer


async def run_load(
    server: Server, prompts: Sequence[str], concurrency: int, num_tokens: int, extra: dict[str, Any]
) -> dict[str, Any]:
    """`concurrency` readers share the prompts; each asks again when its answer has ended."""
    waiting = iter(prompts)
    answers: list[Answer] = []

    async def reader() -> None:
        for prompt in waiting:
            answer = await ask(server, _request(server, prompt, num_tokens, extra))
            answers.append(answer)

    begin_s = time.monotonic()
    await asyncio.gather(*(reader() for _ in range(concurrency)))
    return _result(answers, time.monotonic() - begin_s)


def _result(answers: list[Answer], wall_s: float) -> dict[str, Any]:
    good = [answer for answer in answers if not answer.error]
    num_tokens = sum(answer.num_tokens for answer in good)
    return {
        "wall_s": wall_s,
        "requests": len(answers),
        "completed": len(good),
        "num_tokens": num_tokens,
        "prompt_tokens": sum(answer.prompt_tokens for answer in good),
        "tok_s": num_tokens / wall_s,
        "ttft_p50_ms": _quantile((answer.ttft_ms for answer in good), 0.50),
        "ttft_p95_ms": _quantile((answer.ttft_ms for answer in good), 0.95),
        "tpot_p50_ms": statistics.median([answer.tpot_ms for answer in good] or [0.0]),
        "first_error": next((answer.error for answer in answers if answer.error), ""),
    }


def _quantile(values: Iterable[float], share: float) -> float:
    ordered = sorted(values) or [0.0]
    return ordered[round((len(ordered) - 1) * share)]
