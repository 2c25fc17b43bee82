"""The SSE parser: any cut of any stream gives the same events."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plugins.sse import EventTooLarge, SSEEvent, SSEParser


def parse(*pieces: bytes) -> list[tuple[str, bytes]]:
    parser = SSEParser()
    events: list[SSEEvent] = []
    for piece in pieces:
        events += parser.feed(piece)
    events += parser.finish()
    return [(event.event, event.data) for event in events]


def message(*data: bytes) -> list[tuple[str, bytes]]:
    return [("message", item) for item in data]


@pytest.mark.parametrize(
    ("stream", "expected"),
    [
        (b"data: a\n\ndata: b\n\n", message(b"a", b"b")),
        (b"data: a\r\n\r\ndata: b\r\n\r\n", message(b"a", b"b")),
        (b"data: a\r\rdata: b\r\r", message(b"a", b"b")),
        (b"data: a\r\n\ndata: b\n\r\n\r", message(b"a", b"b")),
        (b"\xef\xbb\xbfdata: a\n\n", message(b"a")),
        (b"data:a\n\n", message(b"a")),
        (b"data:  a\n\n", message(b" a")),
        (b"data: a\ndata:\ndata: b\n\n", message(b"a\n\nb")),
        (b"data\n\n", message(b"")),
        (b"data: a\n: hb\ndata: b\n\n", message(b"a\nb")),
        (b": OPENROUTER PROCESSING\n\n:\n\ndata: a\n\n", message(b"a")),
        (b"retry: 1\n\nid: 1\n\nevent: hello\n\nid: 0\ndata: a\n\n", message(b"a")),
        (b"foo: bar\nnocolon\ndata: a\n\n", message(b"a")),
        (b"event: error\ndata: a\n\ndata: b\n\n", [("error", b"a"), ("message", b"b")]),
        (b"event:\ndata: a\n\n", message(b"a")),
        (b"\n\n\n\ndata: a\n\n\n\n\ndata: b\n\n\n", message(b"a", b"b")),
        (b"data: a\n\ndata: [DONE]\n", message(b"a", b"[DONE]")),
        (b"data: a\n\ndata: [DONE]", message(b"a", b"[DONE]")),
        (b"data: \xff\xfe\x00\n\n", message(b"\xff\xfe\x00")),
        (b" data: a\n\n", []),
        (b"\xef\xbb", []),
        (b"", []),
    ],
)
def test_a_stream_is_read_as_the_standard_says(stream: bytes, expected: list[object]) -> None:
    assert parse(stream) == expected
    assert parse(*(stream[i : i + 1] for i in range(len(stream)))) == expected
    for cut in range(len(stream)):
        assert parse(stream[:cut], b"", stream[cut:]) == expected


_PIECES = st.sampled_from(
    [b"data:", b"data: ", b"event: x", b":", b"\n", b"\r", b"\r\n", b"\n\n", b"a", b"\xef\xbb\xbf"]
)


@given(st.lists(_PIECES, max_size=40), st.lists(st.integers(0, 200), max_size=20))
def test_any_cut_of_any_stream_gives_the_same_events(pieces: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(pieces)
    edges = sorted({0, len(stream), *(cut % (len(stream) + 1) for cut in cuts)})
    cut_up = [stream[start:end] for start, end in itertools.pairwise(edges)]
    assert parse(*cut_up) == parse(stream)


def reference(stream: bytes) -> list[tuple[str, bytes]]:
    """The standard's algorithm line by line, without any care for speed."""
    text = stream.removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    events: list[tuple[str, bytes]] = []
    kind, data = b"", list[bytes]()
    for line in [*text.split(b"\n"), b""]:
        field, _, value = line.partition(b":")
        value = value[1:] if value.startswith(b" ") else value
        if not line and data:
            events.append((kind.decode() or "message", b"\n".join(data)))
        if not line:
            kind, data = b"", []
        elif field == b"data":
            data.append(value)
        elif field == b"event":
            kind = value
    return events


@given(st.lists(_PIECES, max_size=40))
def test_the_parser_agrees_with_the_standards_algorithm(pieces: list[bytes]) -> None:
    stream = b"".join(pieces)
    assert parse(stream) == reference(stream)


def test_a_three_megabyte_line_in_small_reads_is_joined_once() -> None:
    line = b"data: " + b"x" * 3_000_000 + b"\n\n"
    parser = SSEParser()
    events = [e for i in range(0, len(line), 4096) for e in parser.feed(line[i : i + 4096])]
    assert [len(event.data) for event in events] == [3_000_000]


def test_an_event_beyond_the_limit_is_refused_with_the_limit() -> None:
    parser = SSEParser(max_event_bytes=1000)
    parser.feed(b"data: " + b"x" * 900)
    with pytest.raises(EventTooLarge, match="1000 bytes"):
        parser.feed(b"x" * 200)


def test_many_small_lines_without_a_blank_one_count_towards_the_limit() -> None:
    parser = SSEParser(max_event_bytes=1000)
    with pytest.raises(EventTooLarge):
        for _ in range(200):
            parser.feed(b"data: x\n")


def test_events_below_the_limit_never_add_up() -> None:
    parser = SSEParser(max_event_bytes=20)
    assert sum(len(parser.feed(b"data: abc\n\nda" + b"ta: abc\n\n")) for _ in range(100)) == 200
