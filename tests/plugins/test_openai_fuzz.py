"""Whatever JSON an upstream sends, reading it ends in events or in an upstream error, never in another exception."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.errors import UpstreamError
from tests.plugins.openai_answers import DONE, ROLE, chunk, head, see, sse
from tests.plugins.openai_reading import answer_format, read_body, read_stream

_SCALARS = st.sampled_from(
    [None, True, False, 0, 1, -1, 10**30, 1.5, "", "x", "stop", "tool_calls", "429", "\ud83c"]
)
# fmt: off
_NAMES = st.sampled_from(
    [
        "choices", "delta", "message", "content", "text", "tool_calls", "function",
        "name", "arguments", "id", "index", "type", "role", "finish_reason",
        "usage", "prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details", "cached_tokens",
        "logprobs",
        "tokens", "token_logprobs", "top_logprobs", "token", "logprob", "bytes", "error",
        "code", "param", "object", "created", "model", "reasoning_content", "reasoning",
        "refusal", "function_call", "thinking", "detail", "msg", "data",
    ]
)
# fmt: on
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_NAMES, inner, max_size=5),
    max_leaves=20,
)
_CHOICE = st.fixed_dictionaries(
    {},
    optional={
        "index": _SCALARS,
        "delta": _VALUES,
        "message": _VALUES,
        "text": _VALUES,
        "logprobs": _VALUES,
        "finish_reason": _SCALARS,
    },
)
_CHUNK = st.builds(
    lambda choices, more: {**head("chat.completion.chunk"), "choices": choices, **more},
    st.lists(_CHOICE, max_size=3),
    st.dictionaries(_NAMES, _VALUES, max_size=2),
)
_PIECE = st.sampled_from(
    [
        chunk({"content": "a"}),
        chunk({"content": "b"}, index=1),
        chunk({"role": "assistant", "content": "c"}, "stop", index=1),
        chunk(
            {"tool_calls": [{"index": 0, "id": "x", "type": "function", "function": {"name": "f"}}]}
        ),
        chunk({"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]}),
        chunk({"tool_calls": [{"index": 1, "function": {"name": "g", "arguments": {}}}]}),
        chunk({}, "stop"),
        chunk({}, ""),
        chunk(None, "tool_calls"),
    ]
)


def encode(document: Any) -> bytes:
    try:
        return msgspec.json.encode(document)
    except (msgspec.MsgspecError, UnicodeEncodeError, OverflowError):  # halves of characters
        import json

        return json.dumps(document).encode()


@settings(deadline=None, max_examples=50)
@given(st.lists(_CHUNK | _PIECE, max_size=6), st.sampled_from([0, 1, 50]), st.booleans())
def test_any_chunks_end_in_events_or_an_upstream_error(
    chunks: list[Any], split: int, verbatim: bool
) -> None:
    stream = b"".join(b"data: %b\n\n" % encode(document) for document in chunks) + sse(DONE)
    for dialect in ("chat", "completions"):
        events, failure = read_stream(stream, split, verbatim=verbatim, dialect=dialect)
        see(events)
        assert failure is None or 400 <= failure.status <= 599


@settings(deadline=None, max_examples=50)
@given(_VALUES | _CHUNK, st.sampled_from(["chat", "completions", "embeddings"]), st.booleans())
def test_any_body_ends_in_events_or_an_upstream_error(
    document: Any, dialect: str, verbatim: bool
) -> None:
    try:
        see(read_body(encode(document), dialect=dialect, verbatim=verbatim))
    except UpstreamError as error:
        assert 400 <= error.status <= 599


@settings(deadline=None, max_examples=50)
@given(_VALUES, st.integers(400, 599))
def test_any_error_body_is_read(document: Any, status: int) -> None:
    errors = answer_format()._errors
    error = errors.from_answer(status, {}, encode(document))
    assert error.status == status
    assert error.message
    assert error.code is None or isinstance(error.code, str)


@settings(deadline=None, max_examples=50)
@given(st.lists(_PIECE, max_size=8), st.integers(0, 9))
def test_both_lanes_tell_the_same_story(pieces: list[Any], split: int) -> None:
    stream = sse(ROLE, *pieces, DONE)
    told: list[Any] = []
    for verbatim in (True, False):
        events, failure = read_stream(stream, split, verbatim=verbatim)
        seen = see(events)
        calls = {i: (c["name"], c["arguments"]) for i, c in seen.calls.items()}
        told.append((seen.content.get(0, ""), seen.content.get(1, ""), calls, seen.finish, failure))
    assert told[0] == told[1]
