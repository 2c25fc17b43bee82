"""The reader's side of an answer: deadlines, leaving early, back-pressure, content encodings."""

from __future__ import annotations

import asyncio
import gzip
import zlib
from collections.abc import Callable

import pytest

from plugins.errors import UpstreamTimeout, UpstreamUnavailable
from plugins.interfaces import Timeout
from plugins.providers import http_response
from tests.plugins.fake_upstream import (
    HANG,
    LAST_CHUNK,
    FakeUpstream,
    Step,
    answer,
    chunk,
    head,
)
from tests.plugins.http_client_use import OK, fetch, open_client

pytestmark = pytest.mark.anyio


@pytest.fixture(params=[False, True], ids=["asyncio", "uvloop"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, bool]]:
    """Both event loops: their transports differ in when they close, pause and report a broken connection."""
    return "asyncio", {"use_uvloop": request.param}


# -- Deadlines -------------------------------------------------------------------------------------


def timeout(**seconds: float) -> Timeout:
    return Timeout(**{"connect_s": 60, "first_token_s": 60, "idle_s": 60, "total_s": 60, **seconds})


async def test_a_silent_upstream_times_out_before_its_head() -> None:
    async with (
        FakeUpstream([HANG]) as upstream,
        open_client(upstream.url, timeout(first_token_s=0.02)) as client,
    ):
        with pytest.raises(UpstreamTimeout, match=r"no answer began within 0\.02 s") as caught:
            await fetch(client)
        assert caught.value.status == 504
        await upstream.client_gone.wait()


async def test_a_head_without_a_body_times_out_too() -> None:
    async with (
        FakeUpstream([head(), HANG]) as upstream,
        open_client(upstream.url, timeout(first_token_s=0.05)) as client,
    ):
        response = await client.request("POST", "/x", b"", b"")
        with pytest.raises(UpstreamTimeout, match="no answer began"):
            await response.next()


async def test_a_gap_after_progress_times_out_as_idle() -> None:
    async with (
        FakeUpstream([head(), chunk(b"x"), HANG]) as upstream,
        open_client(upstream.url, timeout(idle_s=0.02)) as client,
    ):
        response = await client.request("POST", "/x", b"", b"")
        assert await response.next() == b"x"
        response.progressed()
        with pytest.raises(UpstreamTimeout, match=r"nothing more came for 0\.02 s"):
            await response.next()


async def test_bytes_without_progress_do_not_put_the_first_deadline_off() -> None:
    script: list[Step] = [head(), *[chunk(b": keep-alive\n\n")] * 3, HANG]
    async with (
        FakeUpstream(script) as upstream,
        open_client(upstream.url, timeout(first_token_s=0.05)) as client,
    ):
        response = await client.request("POST", "/x", b"", b"")
        with pytest.raises(UpstreamTimeout, match="no answer began"):
            while True:
                await response.next()


async def test_the_whole_answer_has_a_deadline() -> None:
    async with (
        FakeUpstream([head(), chunk(b"x"), HANG]) as upstream,
        open_client(upstream.url, timeout(total_s=0.02)) as client,
    ):
        response = await client.request("POST", "/x", b"", b"")
        with pytest.raises(UpstreamTimeout, match=r"longer than 0\.02 s"):
            await response.read(100)


async def test_a_slow_reader_is_not_the_upstreams_fault() -> None:
    gate = asyncio.Event()
    script: list[Step] = [head(), chunk(b"x"), gate, chunk(b"y"), LAST_CHUNK]
    async with (
        FakeUpstream(script) as upstream,
        open_client(upstream.url, timeout(idle_s=0.01)) as client,
    ):
        response = await client.request("POST", "/x", b"", b"")
        assert await response.next() == b"x"
        response.progressed()
        await asyncio.sleep(0.05)  # the reader is busy for five idle times
        response.progressed()
        gate.set()
        assert await response.next() == b"y"


async def test_a_timer_left_from_one_request_does_not_end_the_next() -> None:
    async with (
        FakeUpstream([OK], [head(), chunk(b"x"), HANG]) as upstream,
        open_client(upstream.url, timeout(first_token_s=0.05, idle_s=30)) as client,
    ):
        await fetch(client)
        response = await client.request("POST", "/x", b"", b"")
        assert await response.next() == b"x"
        response.progressed()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await response.next()
        response.close()


async def test_a_connect_that_takes_too_long_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    async def hang(*_: object, **__: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", hang)
    async with open_client("http://127.0.0.1:1", timeout(connect_s=0.01)) as client:
        with pytest.raises(UpstreamTimeout, match=r"no connection within 0\.01 s"):
            await fetch(client)


# -- Leaving ---------------------------------------------------------------------------------------


async def test_closing_a_response_closes_the_upstream_connection() -> None:
    async with (
        FakeUpstream([head(), chunk(b"x"), HANG]) as upstream,
        open_client(upstream.url) as client,
    ):
        response = await client.request("POST", "/x", b"", b"")
        response.close()
        response.close()
        await upstream.client_gone.wait()
        assert client.stats() == {"connections_active": 0, "connections_idle": 0}


async def test_cancelling_a_request_closes_the_upstream_connection() -> None:
    async with FakeUpstream([HANG]) as upstream, open_client(upstream.url) as client:
        task = asyncio.create_task(fetch(client))
        while not upstream.requests:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await upstream.client_gone.wait()


async def test_a_discarded_rest_gives_the_connection_back() -> None:
    script: list[Step] = [head(), chunk(b"[DONE]"), chunk(b"more"), LAST_CHUNK]
    async with FakeUpstream(script) as upstream, open_client(upstream.url) as client:
        for _ in range(2):
            response = await client.request("POST", "/x", b"", b"")
            await response.next()
            response.discard()
            response.close()
            while client.stats()["connections_idle"] == 0:
                await asyncio.sleep(0)
        assert upstream.num_connections == 1


@pytest.mark.parametrize(
    "rest",
    [[HANG], [chunk(b"x" * (http_response.DISCARD_BYTES + 1)), HANG]],
    ids=["silent", "long"],
)
async def test_a_discarded_rest_that_does_not_end_is_aborted(
    rest: list[Step], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_response, "DISCARD_S", 0.02)
    async with (
        FakeUpstream([head(), chunk(b"[DONE]"), *rest]) as upstream,
        open_client(upstream.url) as client,
    ):
        response = await client.request("POST", "/x", b"", b"")
        await response.next()
        response.discard()
        await upstream.client_gone.wait()


async def test_closing_the_client_ends_an_answer_in_flight() -> None:
    async with FakeUpstream([head(), HANG]) as upstream, open_client(upstream.url) as client:
        response = await client.request("POST", "/x", b"", b"")
        reader = asyncio.create_task(response.next())
        await asyncio.sleep(0)
        await client.aclose()
        with pytest.raises(UpstreamUnavailable, match="being closed"):
            await reader


# -- Back-pressure ---------------------------------------------------------------------------------


async def test_an_unread_answer_stops_the_upstream_and_reading_starts_it_again() -> None:
    piece = b"x" * 65536
    script: list[Step] = [head(), *[chunk(piece)] * 400, LAST_CHUNK]
    async with FakeUpstream(script) as upstream, open_client(upstream.url) as client:
        response = await client.request("POST", "/x", b"", b"")
        written = -1
        while written != upstream.bytes_written:
            written = upstream.bytes_written
            await asyncio.sleep(0.01)
        assert written < 400 * 65536 // 2
        assert len(await response.read(400 * 65536)) == 400 * 65536
        assert client.stats()["connections_idle"] == 1


async def test_an_answer_that_ends_while_paused_leaves_a_usable_connection() -> None:
    body = b"x" * (http_response.PAUSE_ABOVE_BYTES + 1)
    async with FakeUpstream(answer(body)) as upstream, open_client(upstream.url) as client:
        response = await client.request("POST", "/x", b"", b"")
        while client.stats()["connections_idle"] == 0:
            data = await response.next()
            del data
        assert len(await fetch(client)) == len(body)
        assert upstream.num_connections == 1


# -- Encodings -------------------------------------------------------------------------------------


def raw_deflate(data: bytes) -> bytes:
    compressor = zlib.compressobj(wbits=-15)
    return compressor.compress(data) + compressor.flush()


TEXT = b"hello hello hello " * 50_000


@pytest.mark.parametrize(
    ("encoding", "encode"),
    [
        ("gzip", gzip.compress),
        ("deflate", zlib.compress),
        ("deflate", raw_deflate),
        ("GZIP", lambda data: gzip.compress(data[:99]) + gzip.compress(data[99:])),
        ("identity", bytes),
    ],
    ids=["gzip", "zlib", "raw", "members", "identity"],
)
async def test_an_encoded_body_is_decoded(encoding: str, encode: Callable[[bytes], bytes]) -> None:
    data = encode(TEXT)
    pieces: list[Step] = [chunk(data[i : i + 1000]) for i in range(0, len(data), 1000)]
    script = [head(content_encoding=encoding), *pieces, LAST_CHUNK]
    async with FakeUpstream(script) as upstream, open_client(upstream.url) as client:
        assert await fetch(client) == TEXT


async def test_a_flushed_gzip_piece_is_handed_out_at_once() -> None:
    compressor = zlib.compressobj(wbits=31)
    first = compressor.compress(b"data: a\n\n") + compressor.flush(zlib.Z_SYNC_FLUSH)
    script: list[Step] = [head(content_encoding="gzip"), chunk(first), HANG]
    async with FakeUpstream(script) as upstream, open_client(upstream.url) as client:
        response = await client.request("POST", "/x", b"", b"")
        assert await response.next() == b"data: a\n\n"
        response.close()


async def test_a_compression_bomb_comes_in_bounded_pieces() -> None:
    bomb = gzip.compress(b"\0" * 50_000_000)
    async with (
        FakeUpstream(answer(bomb, content_encoding="gzip")) as upstream,
        open_client(upstream.url) as client,
    ):
        response = await client.request("POST", "/x", b"", b"")
        assert len(await response.next()) <= 256 * 1024
        with pytest.raises(UpstreamUnavailable, match="larger than 1000000 bytes"):
            await response.read(1_000_000)


@pytest.mark.parametrize(
    ("body", "encoding", "message"),
    [
        (b"not gzip at all", "gzip", "cannot be read"),
        (gzip.compress(TEXT)[:-20], "gzip", "end too early"),
        (b"", "br", "nobody asked for"),
        (b"", "gzip, br", "nobody asked for"),
    ],
    ids=["garbage", "cut", "brotli", "two"],
)
async def test_an_encoding_that_cannot_be_read_is_an_error(
    body: bytes, encoding: str, message: str
) -> None:
    async with (
        FakeUpstream(answer(body, content_encoding=encoding)) as upstream,
        open_client(upstream.url) as client,
    ):
        with pytest.raises(UpstreamUnavailable, match=message):
            await fetch(client)
