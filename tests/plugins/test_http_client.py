"""The HTTP client against a server that misbehaves in every way a script can say."""

from __future__ import annotations

import asyncio

import pytest

from plugins.errors import UpstreamUnavailable
from plugins.providers import http_connection
from plugins.providers.connection_pool import ConnectionPool
from plugins.providers.http_message import header_lines
from tests.plugins.fake_upstream import (
    CUT,
    HANG,
    LAST_CHUNK,
    RESET,
    FakeUpstream,
    Step,
    answer,
    chunk,
    head,
    one_byte_writes,
)
from tests.plugins.http_client_use import OK, fetch, open_client

pytestmark = pytest.mark.anyio


@pytest.fixture(params=[False, True], ids=["asyncio", "uvloop"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, bool]]:
    """Both event loops: their transports differ in when they close, pause and report a broken connection."""
    return "asyncio", {"use_uvloop": request.param}


# -- Answers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "script",
    [
        [OK],
        [head(), chunk(b"hel"), chunk(b"lo"), LAST_CHUNK],
        [head(), b"5;ext=1\r\nhello\r\n0\r\ntrailer: x\r\n\r\n"],
        [b"HTTP/1.1 200 OK\r\n\r\nhel", b"lo", CUT],
        [b"HTTP/1.0 200 OK\r\ncontent-length: 5\r\n\r\nhello", CUT],
        [b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 Hints\r\nlink: x\r\n\r\n", OK],
        one_byte_writes(OK),
        one_byte_writes(head() + chunk(b"hello") + LAST_CHUNK),
    ],
    ids=[
        "length",
        "chunked",
        "trailers",
        "until-close",
        "http10",
        "informational",
        "bytes",
        "chunked-bytes",
    ],
)
async def test_a_body_is_read_whole_however_it_is_framed(script: list[Step]) -> None:
    async with FakeUpstream(script) as upstream, open_client(upstream.url) as client:
        assert await fetch(client) == b"hello"


async def test_status_and_headers_are_told_with_lower_case_names() -> None:
    script = b"HTTP/1.1 429 Slow\r\nRetry-After: 7\r\nX-A: 1\r\nx-a: 2\r\ncontent-length: 0\r\n\r\n"
    async with FakeUpstream(script) as upstream, open_client(upstream.url) as client:
        response = await client.request("POST", "/x", b"", b"")
        assert response.status == 429
        assert response.headers[b"retry-after"] == b"7"
        assert response.headers[b"x-a"] == b"1, 2"
        assert await response.next() == b""


async def test_a_204_has_no_body() -> None:
    script = b"HTTP/1.1 204 None\r\n\r\n"
    async with FakeUpstream(script) as upstream, open_client(upstream.url) as client:
        assert await fetch(client) == b""


async def test_the_request_goes_out_as_it_was_given() -> None:
    async with FakeUpstream(OK) as upstream, open_client(upstream.url + "/?v=1") as client:
        response = await client.request("POST", "/x", header_lines({"X-Key": "abc"}), b"[1]")
        response.close()
        received = upstream.requests[0]
        assert (received.method, received.target) == ("POST", "/v1/x?v=1")
        assert received.body == b"[1]"
        assert received.headers["x-key"] == "abc"
        assert received.headers["host"] == f"127.0.0.1:{upstream.port}"


async def test_a_large_request_body_arrives_whole() -> None:
    body = b"0123456789abcdef" * 300_000
    async with FakeUpstream(OK) as upstream, open_client(upstream.url) as client:
        await fetch(client, body)
        assert upstream.requests[0].body == body


async def test_each_chunk_is_handed_out_when_it_comes() -> None:
    more = asyncio.Event()
    script: list[Step] = [head(), chunk(b"first"), more, chunk(b"second"), LAST_CHUNK]
    async with FakeUpstream(script) as upstream, open_client(upstream.url) as client:
        response = await client.request("POST", "/x", b"", b"")
        assert await response.next() == b"first"
        more.set()
        assert await response.next() == b"second"
        assert await response.next() == b""
        assert await response.next() == b""


# -- Keep-alive ------------------------------------------------------------------------------------


async def test_a_connection_is_used_again() -> None:
    async with FakeUpstream(OK) as upstream, open_client(upstream.url) as client:
        for _ in range(3):
            await fetch(client)
        assert upstream.num_connections == 1


async def test_an_unread_but_complete_answer_frees_its_connection() -> None:
    async with FakeUpstream(OK) as upstream, open_client(upstream.url) as client:
        response = await client.request("POST", "/x", b"", b"")
        await fetch(client)
        assert upstream.num_connections == 1
        assert await response.read(100) == b"hello"


@pytest.mark.parametrize(
    "first",
    [
        answer("hello", connection="close"),
        b"HTTP/1.0 200 OK\r\ncontent-length: 5\r\n\r\nhello",
        OK + b"HTTP/1.1 200 OK\r\n",
        OK + b"garbage",
    ],
    ids=["close", "http10", "second-answer", "garbage"],
)
async def test_a_connection_that_must_not_be_reused_is_closed(first: bytes) -> None:
    async with FakeUpstream(first, OK) as upstream, open_client(upstream.url) as client:
        assert await fetch(client) == b"hello"
        assert await fetch(client) == b"hello"
        assert upstream.num_connections == 2


async def test_parallel_requests_have_connections_of_their_own() -> None:
    gate = asyncio.Event()
    async with FakeUpstream([gate, OK]) as upstream, open_client(upstream.url) as client:
        tasks = [asyncio.create_task(fetch(client)) for _ in range(4)]
        while len(upstream.requests) < 4:
            await asyncio.sleep(0)
        assert client.stats() == {"connections_active": 4, "connections_idle": 0}
        gate.set()
        assert await asyncio.gather(*tasks) == [b"hello"] * 4
        assert client.stats() == {"connections_active": 0, "connections_idle": 4}


@pytest.mark.parametrize("end", [CUT, RESET], ids=["cut", "reset"])
async def test_a_stale_connection_is_replaced_once(end: Step) -> None:
    async with FakeUpstream(OK, [end], OK) as upstream, open_client(upstream.url) as client:
        assert await fetch(client) == b"hello"
        assert await fetch(client) == b"hello"
        assert [request.connection for request in upstream.requests] == [1, 1, 2]


async def test_a_request_is_not_sent_a_third_time() -> None:
    async with FakeUpstream(OK, [CUT], [CUT]) as upstream, open_client(upstream.url) as client:
        await fetch(client)
        with pytest.raises(UpstreamUnavailable, match="without an answer"):
            await fetch(client)
        assert len(upstream.requests) == 3


async def test_a_fresh_connection_that_dies_is_not_retried() -> None:
    async with FakeUpstream([CUT], OK) as upstream, open_client(upstream.url) as client:
        with pytest.raises(UpstreamUnavailable, match="provider up: closed the connection"):
            await fetch(client)
        assert len(upstream.requests) == 1


async def test_a_reused_connection_that_dies_after_a_first_byte_is_not_retried() -> None:
    async with FakeUpstream(OK, [b"HTTP/1", CUT]) as upstream, open_client(upstream.url) as client:
        await fetch(client)
        with pytest.raises(UpstreamUnavailable):
            await fetch(client)
        assert len(upstream.requests) == 2


async def test_bytes_on_an_idle_connection_end_it() -> None:
    farewell = asyncio.Event()
    script: list[Step] = [OK, farewell, b"HTTP/1.1 408 Bye\r\n\r\n", HANG]
    async with FakeUpstream(script, OK) as upstream, open_client(upstream.url) as client:
        await fetch(client)
        farewell.set()
        await upstream.client_gone.wait()
        assert await fetch(client) == b"hello"
        assert upstream.num_connections == 2


async def test_idle_connections_expire() -> None:
    pool = ConnectionPool(asyncio.get_running_loop(), idle_expiry_s=0.01)
    async with (
        FakeUpstream([OK, HANG]) as upstream,
        open_client(upstream.url, pool=pool) as client,
    ):
        await fetch(client)
        assert pool.num_idle == 1
        await upstream.client_gone.wait()
        assert pool.num_idle == 0


async def test_the_pool_keeps_no_more_than_its_size() -> None:
    pool = ConnectionPool(asyncio.get_running_loop(), max_idle=2)
    async with FakeUpstream(OK) as upstream, open_client(upstream.url, pool=pool) as client:
        await asyncio.gather(*(fetch(client) for _ in range(5)))
        assert (pool.num_idle, pool.num_active) == (2, 0)


# -- Broken answers --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "script",
    [
        [answer("hello")[:-2], CUT],
        [answer("hello")[:-2], RESET],
        [head(), chunk(b"hello"), CUT],
        [head(), chunk(b"hello")[:-3], CUT],
        [b"HTTP/1.1 200 OK\r\n\r\nhel", RESET],
    ],
    ids=["length-cut", "length-reset", "chunked-cut", "in-chunk", "until-close-reset"],
)
async def test_a_truncated_body_is_an_error_after_what_came(script: list[Step]) -> None:
    async with FakeUpstream(script) as upstream, open_client(upstream.url) as client:
        response = await client.request("POST", "/x", b"", b"")
        with pytest.raises(UpstreamUnavailable, match="broke in the middle"):
            await response.read(100)


@pytest.mark.parametrize(
    "script",
    [
        b"SSH-2.0-OpenSSH_9.0\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n",
        b"HTTP/1.1 101 Switching\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
    ],
    ids=["ssh", "two-lengths", "bad-length", "upgrade"],
)
async def test_what_is_no_http_is_an_error(script: bytes) -> None:
    async with FakeUpstream(script) as upstream, open_client(upstream.url) as client:
        with pytest.raises(UpstreamUnavailable, match=r"not HTTP/1\.1"):
            await fetch(client)


async def test_a_broken_chunk_size_is_an_error() -> None:
    script: list[Step] = [head(), chunk(b"hello"), b"zz\r\n"]
    async with FakeUpstream(script) as upstream, open_client(upstream.url) as client:
        with pytest.raises(UpstreamUnavailable, match=r"not HTTP/1\.1"):
            await fetch(client)


@pytest.mark.parametrize(
    "headers",
    [
        b"".join(b"x-%d: 1\r\n" % i for i in range(http_connection.MAX_HEADERS + 1)),
        b"x: " + b"a" * (http_connection.MAX_HEADER_BYTES + 1) + b"\r\n",
        b"x: " + b"a" * (http_connection.MAX_FRAMING_BYTES * 2),
    ],
    ids=["many", "large", "endless"],
)
async def test_too_many_headers_are_refused_with_the_limits(headers: bytes) -> None:
    script: list[Step] = [b"HTTP/1.1 200 OK\r\n" + headers, b"content-length: 0\r\n\r\n", HANG]
    async with FakeUpstream(script) as upstream, open_client(upstream.url) as client:
        with pytest.raises(UpstreamUnavailable, match="128 headers or 65536 bytes"):
            await fetch(client)
        await upstream.client_gone.wait()


async def test_an_endless_trailer_is_refused() -> None:
    trailer = b"x: " + b"a" * (http_connection.MAX_FRAMING_BYTES * 2)
    script: list[Step] = [head(), chunk(b"hello"), b"0\r\n", trailer, HANG]
    async with FakeUpstream(script) as upstream, open_client(upstream.url) as client:
        with pytest.raises(UpstreamUnavailable):
            await fetch(client)


async def test_a_body_over_the_limit_is_refused_with_the_limit() -> None:
    async with FakeUpstream(OK) as upstream, open_client(upstream.url) as client:
        response = await client.request("POST", "/x", b"", b"")
        with pytest.raises(UpstreamUnavailable, match="larger than 4 bytes"):
            await response.read(4)
