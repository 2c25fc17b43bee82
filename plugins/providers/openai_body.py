"""The client's own body, made fit for the upstream: another model name, no nulls, usage asked for. Nearly a copy."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Raw

from plugins.events import Request

_decode = msgspec.json.Decoder(dict[str, Raw]).decode
_decode_any = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode
_NULL = b"null"
_TRUE = Raw(b"true")
_INCLUDE_USAGE = Raw(b'{"include_usage":true}')
_NEED_TOOLS = {"tools": ("tool_choice", "parallel_tool_calls"), "functions": ("function_call",)}


def rewrite_body(request: Request, upstream_model: str) -> bytes:
    """`request.body` for the upstream. Values keep their bytes; only the top level is looked at.

    A key given twice counts with its last value, as our own decoder read it. null means absent, an empty list of tools
    means no tools. Streams always ask for usage: whether the client sees it is decided when the answer is written.
    """
    fields = {k: v for k, v in _decode(request.body).items() if not _is_null(v)}
    fields["model"] = Raw(_encode(upstream_model))
    for tools, dependents in _NEED_TOOLS.items():
        if _is_empty_list(fields.get(tools)):
            fields.pop(tools, None)
            for name in dependents:
                fields.pop(name, None)
    if request.stream:
        fields["stream"] = _TRUE
        options = fields.get("stream_options")
        fields["stream_options"] = _INCLUDE_USAGE if options is None else _with_usage(options)
    else:
        fields.pop("stream_options", None)
    return _encode(fields)


def _is_null(value: Raw) -> bool:
    return len(value) == len(_NULL) and bytes(value) == _NULL


def _is_empty_list(value: Raw | None) -> bool:
    """Also true for no list at all: a choice among tools means nothing without them."""
    return value is None or (len(value) < 16 and _decode_any(value) == [])


def _with_usage(options: Raw) -> Raw:
    decoded: Any = _decode_any(options)
    if not isinstance(decoded, dict):
        return _INCLUDE_USAGE
    return Raw(_encode({**decoded, "include_usage": True}))
