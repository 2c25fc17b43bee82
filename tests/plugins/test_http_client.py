"""The HTTP client against a server that misbehaves in every way a script can say."""

from __future__ import annotations

import asyncio
import gzip
import socket
import ssl
import zlib
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from plugins.errors import UpstreamTimeout, UpstreamUnavailable
from plugins.interfaces import Timeout
from plugins.providers import http_connection, http_response
from plugins.providers.connection_pool import ConnectionPool
from plugins.providers.http_client import HTTPClient
from plugins.providers.http_message import header_fault, header_lines, parse_base_url
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

pytestmark = pytest.mark.anyio
PATIENT = Timeout()
OK = answer("hello")
DATA = Path(__file__).parent / "data"


@pytest.fixture(params=[False, True], ids=["asyncio", "uvloop"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, bool]]:
    """Both event loops: their transports differ in when they close, pause and report a broken connection."""
    return "asyncio", {"use_uvloop": request.param}


@asynccontextmanager
async def open_client(
    url: str, timeout: Timeout = PATIENT, **kwargs: Any
) -> AsyncGenerator[HTTPClient, None]:
    client = HTTPClient("up", parse_base_url(url), timeout, **kwargs)
    try:
        yield client
    finally:
        await client.aclose()


async def fetch(client: HTTPClient, body: bytes = b"{}") -> bytes:
    response = await client.request("POST", "/x", b"", body)
    try:
        return await response.read(10_000_000)
    finally:
        response.close()


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


# -- No connection ---------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


async def test_a_refused_connection_says_so_without_the_address() -> None:
    port = free_port()
    async with open_client(f"http://127.0.0.1:{port}") as client:
        with pytest.raises(UpstreamUnavailable, match="provider up: nothing listens") as caught:
            await fetch(client)
        assert str(port) not in caught.value.message
        assert caught.value.status == 502


async def test_an_unknown_host_says_so_without_the_name() -> None:
    async with open_client("http://no-such-host.invalid") as client:
        with pytest.raises(UpstreamUnavailable, match="cannot be resolved") as caught:
            await fetch(client)
        assert "no-such-host" not in caught.value.message


async def test_a_server_that_speaks_no_tls_fails_the_handshake() -> None:
    async def speak_plainly(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(speak_plainly, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, open_client(f"https://127.0.0.1:{port}") as client:
        with pytest.raises(UpstreamUnavailable, match="TLS handshake failed"):
            await fetch(client)


def server_tls() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(DATA / "localhost.pem")
    return context


async def test_tls_checks_the_certificate_and_the_name() -> None:
    trusting = ssl.create_default_context(cafile=str(DATA / "ca.pem"))
    async with FakeUpstream(OK, tls=server_tls()) as upstream:
        url = f"https://localhost:{upstream.port}"
        async with open_client(url, ssl_context=trusting) as client:
            assert await fetch(client) == b"hello"
            assert await fetch(client) == b"hello"
            assert upstream.num_connections == 1


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
async def test_a_certificate_that_nobody_vouches_for_is_refused(host: str) -> None:
    cafile = str(DATA / "ca.pem") if host == "127.0.0.1" else None  # trusted, but for another name
    context = ssl.create_default_context(cafile=cafile)
    async with FakeUpstream(OK, tls=server_tls()) as upstream:
        async with open_client(f"https://{host}:{upstream.port}", ssl_context=context) as client:
            with pytest.raises(UpstreamUnavailable, match="certificate is not accepted"):
                await fetch(client)
        assert not upstream.requests


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


# -- URLs and headers ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "authority", "target"),
    [
        ("http://a", "a", "/x"),
        ("http://a:80/v1/", "a", "/v1/x"),
        ("https://a:443/v1", "a", "/v1/x"),
        ("https://a:80/v1", "a:80", "/v1/x"),
        ("http://[::1]:8000/v1", "[::1]:8000", "/v1/x"),
        ("https://bücher.example/v1", "xn--bcher-kva.example", "/v1/x"),
        ("https://a/deployments/d?api-version=1", "a", "/deployments/d/x?api-version=1"),
    ],
)
def test_a_base_url_gives_host_and_target(url: str, authority: str, target: str) -> None:
    base_url = parse_base_url(url)
    assert (base_url.authority, base_url.target("/x")) == (authority, target)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("", "http://"),
        ("ftp://a", "http://"),
        ("a.example/v1", "http://"),
        ("http://", "host"),
        ("http://a:99999", "valid"),
        ("http://[::1", "valid"),
        ("http://user:pass@a", "credentials"),
        ("http://a/#x", "fragment"),
        ("http://a/b c", "percent-encoded"),
        ("http://a/\r\nx: y", "percent-encoded|valid"),
    ],
)
def test_a_bad_base_url_is_refused_without_showing_it(url: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        parse_base_url(url)
    assert "pass" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("x y", "1"),
        ("x\r\n", "1"),
        ("", "1"),
        ("x", "a\r\nb: c"),
        ("x", "a\0"),
        ("x", " a"),
        ("x", "ж"),
    ],
)
def test_a_header_that_could_break_its_line_is_refused(name: str, value: str) -> None:
    assert header_fault(name, value) is not None
    with pytest.raises(ValueError, match="header"):
        header_lines({name: value})


def test_headers_of_the_connection_itself_are_not_configured() -> None:
    assert header_fault("Content-Length", "1") is not None
    assert header_fault("X-Title", "my app") is None
