"""Requests and answers on one connection, over real sockets, by RFC 9112."""

from __future__ import annotations

import asyncio

import pytest
from starlette.types import Receive, Scope, Send

from gateway.http_exchange import ON_DISCONNECT
from tests.gateway.server_client import answer, connected, echo

pytestmark = pytest.mark.anyio
GET = b"GET /a%20b?c=d HTTP/1.1\r\nhost: x\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nhost: x\r\n"
LAST = b"connection: close\r\n"


async def drip(scope: Scope, receive: Receive, send: Send) -> None:
    """An answer in pieces, of unknown length."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for piece in (b"one ", b"", b"two"):
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body"})


def body_of(raw: bytes) -> bytes:
    return raw.partition(b"\r\n\r\n")[2]


async def test_an_answer_of_unknown_length_is_chunked() -> None:
    async with connected(drip) as client:
        client.send(POST + LAST + b"\r\n")
        raw = await client.until_closed()
    assert b"transfer-encoding: chunked\r\n" in raw
    assert body_of(raw) == b"4\r\none \r\n3\r\ntwo\r\n0\r\n\r\n"


async def test_http_1_0_gets_no_chunks() -> None:
    async with connected(drip) as client:
        client.send(b"GET / HTTP/1.0\r\n\r\n")
        raw = await client.until_closed()
    assert b"chunked" not in raw
    assert body_of(raw) == b"one two"


async def test_requests_that_do_not_wait_are_answered_in_order() -> None:
    async with connected(echo) as client:
        requests = [POST + b"content-length: 1\r\n\r\n%d" % n for n in range(5)]
        client.send(b"".join(requests))
        assert [await client.answer() for _ in requests] == [b"got %d" % n for n in range(5)]


@pytest.mark.parametrize("size", [1, 7, 50])
async def test_a_request_may_come_in_pieces_of_any_size(size: int) -> None:
    request = POST + b"transfer-encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
    async with connected(echo) as client:
        for start in range(0, len(request), size):
            client.send(request[start : start + size])
            await asyncio.sleep(0)
        assert await client.answer() == b"got abcde"


async def test_a_body_larger_than_what_is_held_comes_whole() -> None:
    body = bytes(1_000_000)
    async with connected(echo) as client:
        client.send(POST + b"content-length: %d\r\n\r\n" % len(body) + body)
        assert await client.answer() == b"got " + body
        client.send(POST + b"content-length: 1\r\n\r\nx")
        assert await client.answer() == b"got x"


async def test_a_client_that_asks_first_is_told_to_go_on() -> None:
    async with connected(echo) as client:
        client.send(POST + b"expect: 100-continue\r\ncontent-length: 2\r\n\r\n")
        assert await client.head() == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.send(b"hi")
        assert await client.answer() == b"got hi"


async def test_head_gets_the_head_alone() -> None:
    async with connected(echo) as client:
        client.send(b"HEAD / HTTP/1.1\r\nhost: x\r\n" + LAST + b"\r\n")
        raw = await client.until_closed()
    assert b"content-length: 4\r\n" in raw
    assert body_of(raw) == b""


@pytest.mark.parametrize("status", [204, 304])
async def test_an_answer_without_body_has_no_framing(status: int) -> None:
    async def nothing(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body"})

    async with connected(nothing) as client:
        client.send(POST + LAST + b"\r\n")
        raw = await client.until_closed()
    assert b"chunked" not in raw
    assert body_of(raw) == b""


async def test_the_path_is_told_decoded_and_raw() -> None:
    seen: list[Scope] = []

    async def look(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope)
        await answer(send, b"")

    async with connected(look) as client:
        client.send(GET + GET.replace(b"/a", b"http://y/a"))
        await client.answer()
        await client.answer()
    told = [(s["path"], s["raw_path"], s["query_string"]) for s in seen]
    assert told == [("/a b", b"/a%20b", b"c=d")] * 2


@pytest.mark.parametrize(
    "garbage", [b"\x16\x03\x01\x02\x00", b"GET / HTTP/9.9\r\n\r\n", b"POST / HTTP/1.1\nx y\n\n"]
)
async def test_what_is_not_http_gets_a_400_in_json(garbage: bytes) -> None:
    async with connected(echo) as client:
        client.send(garbage)
        raw = await client.until_closed()
    assert raw.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert b'"type":"invalid_request_error"' in body_of(raw)


async def test_a_body_that_breaks_its_framing_gets_a_400() -> None:
    async with connected(echo) as client:
        client.send(POST + b"transfer-encoding: chunked\r\n\r\n3\r\nabc\r\nzz\r\n")
        assert (await client.until_closed()).startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize(
    "garbage", [b"\x00", POST + b"bad header\r\n", POST + b"content-length: x\r\n"]
)
async def test_whole_requests_before_garbage_get_their_answers(garbage: bytes) -> None:
    async with connected(echo) as client:
        client.send(b"".join(POST + b"content-length: 1\r\n\r\n%d" % n for n in range(3)) + garbage)
        assert [await client.answer() for _ in range(3)] == [b"got 0", b"got 1", b"got 2"]
        assert await client.until_closed() == b""


async def test_whole_requests_before_a_broken_body_get_their_answers() -> None:
    broken = POST + b"transfer-encoding: chunked\r\n\r\nzz\r\n"
    async with connected(echo) as client:
        client.send(POST + b"content-length: 1\r\n\r\nx" + broken)
        assert await client.answer() == b"got x"
        assert await client.until_closed() == b""


@pytest.mark.parametrize("value", [b"a\r\nset-cookie: b", b"a\nb", b"a\0b"])
async def test_a_header_value_cannot_begin_another_line(value: bytes) -> None:
    async def inject(scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"x-value", value)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})

    async with connected(inject) as client:
        client.send(GET)
        raw = await client.until_closed()
    assert raw.startswith(b"HTTP/1.1 500 ")
    assert b"x-value" not in raw


async def test_an_app_that_fails_before_its_answer_is_a_500_and_a_hang_up() -> None:
    async def fail(scope: Scope, receive: Receive, send: Send) -> None:
        raise ValueError("secret")

    async with connected(fail) as client:
        client.send(GET)
        raw = await client.until_closed()
    assert raw.startswith(b"HTTP/1.1 500 ")
    assert b"secret" not in raw


@pytest.mark.parametrize("length", [b"1", b"9"])
async def test_an_answer_of_another_length_than_it_says_is_a_500(length: bytes) -> None:
    async def lie(scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-length", length)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"four"})

    async with connected(lie) as client:
        client.send(GET)
        assert (await client.until_closed()).startswith(b"HTTP/1.1 500 ")


@pytest.mark.parametrize("raises", [True, False])
async def test_an_answer_without_its_end_is_not_taken_for_whole(raises: bool) -> None:
    async def half(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})
        if raises:
            raise ValueError

    async with connected(half) as client:
        client.send(GET)
        assert body_of(await client.until_closed()) == b"4\r\nhalf\r\n"


async def test_an_app_hears_at_once_that_its_client_has_left() -> None:
    begun, left = asyncio.Event(), asyncio.Event()

    async def wait(scope: Scope, receive: Receive, send: Send) -> None:
        scope["extensions"][ON_DISCONNECT](left.set)
        begun.set()
        await left.wait()
        await answer(send, b"nobody hears this")

    async with connected(wait) as client:
        client.send(GET)
        await begun.wait()
        await client.close()
        await left.wait()


async def test_who_asks_too_late_hears_of_it_too() -> None:
    begun, left, asked = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def wait(scope: Scope, receive: Receive, send: Send) -> None:
        begun.set()
        while (await receive())["type"] != "http.disconnect":
            pass
        scope["extensions"][ON_DISCONNECT](left.set)
        asked.set()

    async with connected(wait) as client:
        client.send(GET)
        await begun.wait()
        await client.close()
        await asked.wait()
    assert left.is_set()
