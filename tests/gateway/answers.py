"""Read answers as a client library does: split the events, join the deltas."""

from __future__ import annotations

import json
from typing import Any


def read_stream(stream: bytes) -> list[dict[str, Any]]:
    """The chunks of a complete stream; checks that each is one `data:` line and that [DONE] comes once, last."""
    assert stream.endswith(b"\n\n")
    lines = stream.decode().removesuffix("\n\n").split("\n\n")
    assert all(line.startswith("data: ") and "\n" not in line for line in lines)
    payloads = [line.removeprefix("data: ") for line in lines]
    assert payloads.pop() == "[DONE]"
    return [json.loads(payload) for payload in payloads]


def join_chat(chunks: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Message, logprobs and finish reason of each choice."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for piece in chunk["choices"]:
            choice = choices.setdefault(
                piece["index"], {"message": {}, "logprobs": [], "finish_reason": None}
            )
            _join_delta(choice["message"], piece["delta"])
            choice["logprobs"] += (piece["logprobs"] or {}).get("content", [])
            if piece["finish_reason"] is not None:
                assert choice["finish_reason"] is None, "two ends of one choice"
                choice["finish_reason"] = piece["finish_reason"]
    return choices


def _join_delta(message: dict[str, Any], delta: dict[str, Any]) -> None:
    for key, value in delta.items():
        if key == "tool_calls":
            calls = message.setdefault("tool_calls", {})
            for call in value:
                _join_call(calls.setdefault(call.pop("index"), {}), call)
        elif key == "function_call":
            _join_call(message.setdefault(key, {}), value)
        elif isinstance(value, list):
            message.setdefault(key, []).extend(value)
        elif message.get(key) is None:
            message[key] = value
        elif value is not None:
            message[key] += value


def _join_call(call: dict[str, Any], piece: dict[str, Any]) -> None:
    """As clients do: strings are concatenated, so an id or a name sent twice would show."""
    for key, value in piece.items():
        if isinstance(value, dict):
            _join_call(call.setdefault(key, {}), value)
        else:
            call[key] = call.get(key, "") + value
