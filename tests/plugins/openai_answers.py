"""Building blocks of upstream answers, and what a client would make of the events that come out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from plugins.events import (
    Event,
    Finished,
    ReasoningDelta,
    RefusalDelta,
    Started,
    TextDelta,
    ToolCallDelta,
    Usage,
    Verbatim,
)

ID, CREATED, MODEL = "chatcmpl-up1", 1_700_000_000, "up-model"
USAGE = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}


def chunk(delta: Any, finish: Any = None, index: int = 0, **more: Any) -> dict[str, Any]:
    choice = {"index": index, "delta": delta, "finish_reason": finish}
    return {**head("chat.completion.chunk"), "choices": [choice], **more}


def head(kind: str) -> dict[str, Any]:
    return {"id": ID, "object": kind, "created": CREATED, "model": MODEL}


def usage_chunk(**usage: Any) -> dict[str, Any]:
    return {**head("chat.completion.chunk"), "choices": [], "usage": usage or USAGE}


def body(message: Any, finish: Any = "stop", **more: Any) -> dict[str, Any]:
    message = {"role": "assistant", **message} if isinstance(message, dict) else message
    choice = {"index": 0, "message": message, "finish_reason": finish}
    return {**head("chat.completion"), "choices": [choice], "usage": USAGE, **more}


ROLE = chunk({"role": "assistant", "content": ""})
HEL, LO, STOP = chunk({"content": "Hel"}), chunk({"content": "lo"}), chunk({}, "stop")
HELLO = [ROLE, HEL, LO, STOP]
DONE = "[DONE]"


def sse(*payloads: Any, end: str = "\n") -> bytes:
    """Events of these payloads; texts stand as they are, all else as JSON."""
    texts = [p if isinstance(p, str) else msgspec.json.encode(p).decode() for p in payloads]
    return "".join(f"data: {text}{end}{end}" for text in texts).encode()


@dataclass
class Seen:
    """One answer, as a client that joins deltas sees it."""

    started: list[Started] = field(default_factory=list[Started])
    content: dict[int, str] = field(default_factory=dict[int, str])
    reasoning: str = ""
    refusal: str = ""
    calls: dict[int, dict[str, Any]] = field(default_factory=dict[int, dict[str, Any]])
    finish: dict[int, str] = field(default_factory=dict[int, str])
    usage: Usage | None = None
    num_verbatim: int = 0
    bodies: list[bytes] = field(default_factory=list[bytes])

    @property
    def text(self) -> str:
        return self.content.get(0, "")


def see(events: list[Event]) -> Seen:
    """Checks the order of events on the way: Started first, one finish per choice, usage last."""
    seen = Seen()
    for event in events:
        assert seen.usage is None, "nothing comes after usage"
        if isinstance(event, Started):
            seen.started.append(event)
            assert len(seen.started) == 1
            continue
        if isinstance(event, Usage):
            seen.usage = event
            continue
        assert seen.started, "Started comes first"
        if isinstance(event, Verbatim):
            _see_verbatim(event, seen)
        else:
            _see_event(event, seen)
    return seen


def _see_event(event: Event, seen: Seen) -> None:
    if isinstance(event, Finished):
        assert event.choice not in seen.finish
        seen.finish[event.choice] = event.reason
    elif isinstance(event, TextDelta):
        seen.content[event.choice] = seen.content.get(event.choice, "") + event.text
    elif isinstance(event, ReasoningDelta):
        seen.reasoning += event.text
    elif isinstance(event, RefusalDelta):
        seen.refusal += event.text
    elif isinstance(event, ToolCallDelta):
        call = seen.calls.setdefault(event.index, {"id": "", "name": "", "arguments": ""})
        call["id"] += event.id or ""
        call["name"] += event.name or ""
        call["arguments"] += event.arguments


def _see_verbatim(event: Verbatim, seen: Seen) -> None:
    seen.num_verbatim += 1
    for finished in event.finished:
        _see_event(finished, seen)
    if not event.data.startswith(b"data: "):
        seen.bodies.append(event.data)
        return
    assert event.data.endswith(b"\n\n")
    for line in event.data.decode().strip().split("\n\n"):
        document = msgspec.json.decode(line.removeprefix("data: "))
        started = seen.started[0]
        same = (started.id, started.created_s, started.model)
        assert (document["id"], document["created"], document["model"]) == same
        (choice,) = document["choices"]
        delta = choice.get("delta", {})
        text = delta.get("content") or choice.get("text") or ""
        _see_event(TextDelta(text, choice["index"]), seen)
        seen.reasoning += delta.get("reasoning_content") or delta.get("reasoning") or ""
        for call in delta.get("tool_calls") or []:
            function = call["function"]
            piece = ToolCallDelta(
                call["index"],
                0,
                call.get("id"),
                function.get("name"),
                function.get("arguments", ""),
            )
            _see_event(piece, seen)
