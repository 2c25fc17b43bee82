"""Microseconds that the OpenAI dialects cost the gateway per request and per chunk, beside json.loads of the same body.

    python bench/endpoint_codec.py

Best of 40 rounds per line (a loaded machine only adds); collection by the garbage collector is off.
"""

from __future__ import annotations

import json
import timeit
from collections.abc import Callable
from functools import partial

from gateway.endpoints.chat import ChatEndpoint
from gateway.endpoints.completions import CompletionsEndpoint
from plugins.events import Event, Finished, Started, TextDelta, TokenLogprob, ToolCallDelta, Usage

ROUNDS = 40


def best_us(function: Callable[[], object]) -> float:
    number = max(1, int(0.004 / max(timeit.timeit(function, number=1), 1e-6)))
    return min(timeit.repeat(function, number=number, repeat=ROUNDS)) / number * 1e6


def chat_body(**fields: object) -> bytes:
    messages = [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": fields.pop("text", "Tell me a story. " * 48)},
    ]
    body = {"model": "m", "messages": messages, "temperature": 0.7, "max_tokens": 256} | fields
    return json.dumps(body).encode()


def tools(count: int) -> list[dict[str, object]]:
    properties = {f"field_{i}": {"type": "string", "description": "d" * 60} for i in range(30)}
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return [
        {"type": "function", "function": {"name": f"tool_{i}", "parameters": parameters}}
        for i in range(count)
    ]


def turns(count: int) -> bytes:
    one = [{"role": "user", "content": "x" * 400}, {"role": "assistant", "content": "y" * 400}]
    messages = [*(one * count), {"role": "user", "content": "z"}]
    return json.dumps({"model": "m", "messages": messages}).encode()


def decode_lines() -> None:
    chat, completions = ChatEndpoint(), CompletionsEndpoint()
    prompt = json.dumps({"model": "m", "prompt": "word " * 180, "max_tokens": 16}).encode()
    print(f"{'decode':34} {'us':>8} {'json.loads':>11}")
    for name, body, endpoint in [
        ("1 kB chat", chat_body(stream=True), chat),
        ("1 kB chat, vendor fields", chat_body(top_k=40, repetition_penalty=1.1, foo=[1]), chat),
        ("100 kB chat, one text", chat_body(text="word " * 20_000), chat),
        (
            "100 kB chat, code (many braces)",
            chat_body(text="if (x) { y[i] = {}; }\n" * 4_500),
            chat,
        ),
        ("110 kB chat, 250 messages", turns(125), chat),
        ("95 kB chat, 25 tools", chat_body(tools=tools(25)), chat),
        ("1 kB completions", prompt, completions),
    ]:
        decode_us = best_us(partial(endpoint.decode, body, "req_1", 0.0))
        print(f"{name:34} {decode_us:8.2f} {best_us(partial(json.loads, body)):11.2f}")


def encode_lines() -> None:
    chat = ChatEndpoint()
    request = chat.decode(chat_body(stream=True, logprobs=True), "req_1", 0.0)
    started = Started("chatcmpl-1", "model", 1_700_000_000, "fp_1")
    logprob = TokenLogprob(" word", -0.5, [32, 119])
    events: dict[str, Event] = {
        "text": TextDelta(" word"),
        "text with logprobs": TextDelta(" word", logprobs=(logprob,)),
        "tool call": ToolCallDelta(0, arguments='{"a'),
    }
    print(f"\n{'encode one chunk':34} {'us':>8}")
    for name, event in events.items():
        encoder = chat.stream_encoder(request)
        encoder.encode([started, ToolCallDelta(0, id="call_1", name="f")])
        print(f"{name:34} {best_us(partial(encoder.encode, [event])):8.2f}")

    def shortest_stream() -> bytes:
        encoder = chat.stream_encoder(request)
        return encoder.encode([started, TextDelta("x"), Finished("stop")]) + encoder.end()

    def whole_answer() -> bytes:
        collector = chat.collector(request)
        collector.add([started, *[TextDelta(" word")] * 100, Finished("stop"), Usage(10, 100)])
        return collector.body()

    print(f"{'new encoder and a stream of 3':34} {best_us(shortest_stream):8.2f}")
    print(f"{'whole answer of 100 deltas':34} {best_us(whole_answer):8.2f}")


if __name__ == "__main__":
    decode_lines()
    encode_lines()
