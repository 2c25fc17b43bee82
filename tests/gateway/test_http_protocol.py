"""The limits on clients, over real sockets, with the waiting times made short."""

from __future__ import annotations

import asyncio

import pytest
from starlette.types import Receive, Scope, Send

from gateway import http_protocol
from gateway.http_protocol import without_upgrade
from tests.gateway.server_client import Client, answer, connected, echo

pytestmark = pytest.mark.anyio
POST = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n"


async def refuse_unread(scope: Scope, receive: Receive, send: Send) -> None:
    await answer(send, b"no")


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HEAD_S", "BODY_GAP_S", "LINGER_S", "READ_STALL_S"):
        monkeypatch.setattr(http_protocol, name, 0.05)


@pytest.mark.parametrize("sent", [b"", POST, POST + b"\r\nab"], ids=["nothing", "head", "body"])
async def test_a_request_that_does_not_go_on_is_hung_up_on(sent: bytes) -> None:
    async with connected(echo) as client:
        client.send(sent)
        assert await client.until_closed() == b""


async def test_a_head_that_drips_is_hung_up_on() -> None:
    async def drip(client: Client) -> None:
        client.send(b"GET / HTTP/1.1\r\n")
        while True:
            client.send(b"x: y\r\n")
            await asyncio.sleep(0.01)

    async with connected(echo) as client:
        dripping = asyncio.ensure_future(drip(client))
        assert await client.until_closed() == b""
        dripping.cancel()


async def test_a_head_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_S", 60)
    monkeypatch.setattr(http_protocol, "MAX_HEAD_BYTES", 100)
    async with connected(echo) as client:
        client.send(b"GET / HTTP/1.1\r\n")
        await asyncio.sleep(0.01)
        client.send(b"x: y\r\n" * 50)
        assert (await client.until_closed()).startswith(b"HTTP/1.1 431 ")


async def test_a_body_that_goes_on_after_the_refusal_is_not_listened_to() -> None:
    async with connected(refuse_unread) as client:
        client.send(POST.replace(b" 5", b" 50") + b"\r\n")
        assert await client.answer() == b"no"
        assert await client.until_closed() == b""


async def test_a_client_that_reads_nothing_is_let_go() -> None:
    gone = asyncio.Event()

    async def flood(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(1000):
            await send({"type": "http.response.body", "body": b"x" * 100_000, "more_body": True})
        while (await receive())["type"] != "http.disconnect":
            pass
        gone.set()

    async with connected(flood) as client:
        client.send(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await gone.wait()


async def test_a_connection_may_rest_between_requests_and_be_used_again() -> None:
    async with connected(echo) as client:
        for _ in range(2):
            client.send(POST + b"\r\nhello")
            assert await client.answer() == b"got hello"
            await asyncio.sleep(0.1)


async def test_a_handler_may_take_longer_than_the_client_may() -> None:
    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.sleep(0.15)
        await echo(scope, receive, send)

    async with connected(slow) as client:
        client.send(POST + b"\r\nhello")
        assert await client.answer() == b"got hello"


@pytest.mark.parametrize("offer", [b"h2c", b"websocket"])
async def test_a_body_is_read_beside_an_offer_to_upgrade(offer: bytes) -> None:
    async with connected(echo) as client:
        client.send(POST + b"Connection: Upgrade\r\nUpgrade: " + offer + b"\r\n\r\nhello")
        assert await client.answer() == b"got hello"


def test_only_the_head_loses_its_offer_to_upgrade() -> None:
    head, body = POST + b"upgrade: h2c\r\nx: upgrade: no", b"\r\n\r\nupgrade: b\r\n"
    assert without_upgrade(head + body) == POST + b"x: upgrade: no" + body
