"""No connection, and connections with TLS: why, in words that tell no address."""

from __future__ import annotations

import asyncio
import socket
import ssl
from pathlib import Path

import pytest

from plugins.errors import UpstreamUnavailable
from tests.plugins.fake_upstream import (
    FakeUpstream,
)
from tests.plugins.http_client_use import OK, fetch, open_client

pytestmark = pytest.mark.anyio
DATA = Path(__file__).parent / "data"


@pytest.fixture(params=[False, True], ids=["asyncio", "uvloop"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, bool]]:
    """Both event loops: their transports differ in when they close, pause and report a broken connection."""
    return "asyncio", {"use_uvloop": request.param}


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
