"""How the tests read upstream answers, in both lanes and at several splits."""

from __future__ import annotations

from typing import Any

import msgspec

from plugins.errors import UpstreamError
from plugins.events import (
    Event,
    Request,
    Sampling,
)
from plugins.interfaces import Call
from plugins.providers.openai_errors import ErrorReader
from plugins.providers.openai_reader import AnswerFormat
from plugins.secrets import Secret
from tests.plugins.openai_answers import (
    Seen,
    chunk,
    see,
)

NOW = 1_800_000_000.0
KEY = "sk-upstream-secret"


def answer_format(
    verbatim: bool = True, stream: bool = True, dialect: Any = "chat", **sampling: Any
) -> AnswerFormat:
    request = Request("req_1", dialect, "m", stream=stream, sampling=Sampling(**sampling))
    errors = ErrorReader("up", [Secret(KEY)], lambda: NOW)
    return AnswerFormat("up", request, Call("up-model", verbatim=verbatim), errors, lambda: NOW)


def read_stream(
    data: bytes, split: int = 0, **kwargs: Any
) -> tuple[list[Event], UpstreamError | None]:
    reader = answer_format(**kwargs).stream_reader()
    events: list[Event] = []
    step = split or len(data) or 1
    for start in range(0, len(data), step):
        events += reader.feed(data[start : start + step])
        if reader.done or reader.failure is not None:
            return events, reader.failure
    events += reader.end()
    return events, reader.failure


def both_lanes(stream: bytes, **kwargs: Any) -> list[tuple[Seen, UpstreamError | None]]:
    results: list[tuple[Seen, UpstreamError | None]] = []
    for verbatim in (True, False):
        for split in (0, 1, 7):
            events, failure = read_stream(stream, split, verbatim=verbatim, **kwargs)
            results.append((see(events), failure))
    return results


def read_body(document: Any, **kwargs: Any) -> list[Event]:
    raw = document if isinstance(document, bytes) else msgspec.json.encode(document)
    return answer_format(**{"stream": False, **kwargs}).read_body(raw)


def without(call: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in call.items() if name not in names}


CALL = {
    "index": 0,
    "id": "call_1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city":"Oslo"}'},
}


def tool_chunk(*calls: Any, finish: Any = None) -> dict[str, Any]:
    return chunk({"role": "assistant", "content": None, "tool_calls": [*calls]}, finish)


OBJECT_CALL = {**CALL, "function": {"name": "get_weather", "arguments": {"city": "Oslo"}}}
