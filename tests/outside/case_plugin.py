"""The plugin that the outside case runner asks for: it does in words what a case's `plugin` table says.

Its table holds, for `before_request`, `after_response` and `on_failure`, one of a few actions, and `calls_file`, where
the number of times each hook ran is written.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import anyio

from plugins.errors import InvalidRequest
from plugins.events import Event, Request, Text, TextDelta, ToolResult
from plugins.hookspecs import hookimpl
from plugins.interfaces import Context, Observer, RequestFilter, TransformFactory, UsageRecord

WORD = "forbidden"


class Calls:
    """Counts, in a file that outlives the process."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._counts: dict[str, int] = {}

    def add(self, hook: str) -> None:
        self._counts[hook] = self._counts.get(hook, 0) + 1
        self._path.write_text(json.dumps(self._counts))


def _texts(request: Request) -> str:
    parts = [part for message in request.messages for part in message.parts]
    parts += [inner for part in parts if isinstance(part, ToolResult) for inner in part.parts]
    texts = [part.text for part in parts if isinstance(part, Text)]
    return "".join(texts + [p for p in request.prompts if isinstance(p, str)])


class Before:
    def __init__(self, action: str, calls: Calls) -> None:
        self._action = action
        self._calls = calls

    async def apply(self, request: Request, context: Context) -> Request:
        self._calls.add("before_request")
        if self._action == "raise":
            raise RuntimeError("the plugin is broken")
        if self._action.startswith("sleep"):
            await anyio.sleep(30)
        if self._action.startswith("refuse") and WORD in _texts(request):
            raise InvalidRequest("the request holds a word that is not allowed")
        return request


class After:
    """Holds back what may become the word; appends at the end."""

    def __init__(self, action: str) -> None:
        self._action = action
        self._held = ""

    def feed(self, events: list[Event]) -> list[Event]:
        if self._action == "raise":
            raise RuntimeError("the plugin is broken")
        return [e for e in map(self._one, events) if e is not None]

    def _one(self, event: Event) -> Event | None:
        if not isinstance(event, TextDelta) or not self._action.startswith("refuse"):
            return event
        text = self._held + event.text
        if WORD in text:
            raise InvalidRequest("the answer holds a word that is not allowed")
        keep = next(n for n in range(len(WORD) - 1, -1, -1) if text.endswith(WORD[:n]))
        self._held = text[len(text) - keep :]
        return TextDelta(text[: len(text) - keep], event.choice)

    def flush(self) -> list[Event]:
        tail = self._held + ("!" if self._action.startswith("append") else "")
        return [TextDelta(tail)] if tail else []


class Failures:
    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    async def on_usage(self, record: UsageRecord) -> None:
        if record.outcome == "error":
            self._calls.add("on_failure")


@hookimpl
def register_filters(
    register: Callable[[RequestFilter], None], settings: Mapping[str, Any]
) -> None:
    if "before_request" in settings:
        register(Before(settings["before_request"], Calls(settings["calls_file"])))


@hookimpl
def register_transforms(
    register: Callable[[TransformFactory], None], settings: Mapping[str, Any]
) -> None:
    if "after_response" not in settings:
        return
    calls = Calls(settings["calls_file"])

    def build(request: Request, context: Context) -> After:
        calls.add("after_response")
        return After(settings["after_response"])

    register(build)


@hookimpl
def register_observers(register: Callable[[Observer], None], settings: Mapping[str, Any]) -> None:
    if "on_failure" in settings:
        register(Failures(Calls(settings["calls_file"])))
