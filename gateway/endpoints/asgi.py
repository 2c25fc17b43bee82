"""Plain ASGI: read a body within its limits, send an answer, watch for the client leaving."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable

from starlette.types import Message, Receive, Scope, Send

from gateway.errors import ErrorBody, error_headers
from gateway.http_exchange import ON_DISCONNECT
from plugins.errors import GatewayError, InvalidRequest, PayloadTooLarge, UnsupportedMediaType

Headers = list[tuple[bytes, bytes]]
JSON = (b"content-type", b"application/json")


class ClientGone(Exception):
    """The client left before its request was whole: nobody reads an answer."""


def header(scope: Scope, name: bytes) -> bytes | None:
    for key, value in scope["headers"]:
        if key == name:
            return value
    return None


def check_json_content_type(scope: Scope) -> None:
    """A missing content type passes; another than JSON is refused, as a browser form may post without a preflight."""
    value = header(scope, b"content-type")
    if value and value.split(b";", 1)[0].strip().lower() not in (b"application/json", b"text/json"):
        shown = value[:100].decode("latin-1")
        raise UnsupportedMediaType(
            f"Unsupported content type: '{shown}'. Use 'application/json' instead."
        )


async def read_body(scope: Scope, receive: Receive, max_bytes: int) -> bytes:
    """The whole body, decompressed. The limit counts before and after decompression.

    Raises:
        PayloadTooLarge, UnsupportedMediaType, InvalidRequest, ClientGone
    """
    declared = header(scope, b"content-length")
    if declared and declared.isdigit() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    message = await receive()
    body = _chunk(message)
    if message.get("more_body"):
        body = await _read_rest(body, receive, max_bytes)
    if len(body) > max_bytes:
        raise _too_large(max_bytes)
    encoding = header(scope, b"content-encoding")
    if encoding and encoding.strip().lower() != b"identity":
        return _decompress(body, encoding.strip().lower(), max_bytes)
    return body


async def _read_rest(first: bytes, receive: Receive, max_bytes: int) -> bytes:
    chunks, size, more = [first], len(first), True
    while more:
        message = await receive()
        chunk = _chunk(message)
        size += len(chunk)
        if size > max_bytes:
            raise _too_large(max_bytes)
        chunks.append(chunk)
        more = message.get("more_body", False)
    return b"".join(chunks)


def _chunk(message: Message) -> bytes:
    if message["type"] == "http.disconnect":
        raise ClientGone
    return message.get("body", b"")


def _decompress(body: bytes, encoding: bytes, max_bytes: int) -> bytes:
    if encoding not in (b"gzip", b"deflate"):
        shown = encoding[:50].decode("latin-1")
        raise UnsupportedMediaType(f"Unsupported content encoding: '{shown}'. Use gzip or none.")
    decompressor = zlib.decompressobj(zlib.MAX_WBITS | 32)  # gzip or zlib, by its header
    try:
        out = decompressor.decompress(body, max_bytes + 1)
    except zlib.error as exc:
        raise InvalidRequest("The body is not valid gzip, as its content-encoding says.") from exc
    if len(out) > max_bytes:
        raise _too_large(max_bytes)
    if not decompressor.eof:
        raise InvalidRequest("The compressed body ends too early.")
    return out


def _too_large(max_bytes: int) -> PayloadTooLarge:
    return PayloadTooLarge(
        f"The request body is larger than {max_bytes / 2**20:g} MiB (server.max_body_mb)."
    )


async def send_body(send: Send, status: int, headers: Headers, body: bytes) -> None:
    headers = [*headers, (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def send_error(
    send: Send, error: GatewayError, headers: Headers, error_body: ErrorBody
) -> None:
    await send_body(send, error.status, [JSON, *headers, *error_headers(error)], error_body(error))


class CancelledWhenClientLeaves:
    """Cancel the block when the connection drops. A bare ASGI app hears of it only if somebody listens.

    Our server calls back (`ON_DISCONNECT`). Under another one a task listens, which takes 15 us of a request.
    """

    __slots__ = ("_has_left", "_on_disconnect", "_task", "_watch")

    def __init__(self, scope: Scope, receive: Receive) -> None:
        loop = asyncio.get_running_loop()
        task = asyncio.current_task(loop)
        assert task is not None
        self._task = task
        self._has_left = False
        self._on_disconnect = scope.get("extensions", {}).get(ON_DISCONNECT)
        self._watch: asyncio.Task[None] | None = None
        if self._on_disconnect is None:
            self._watch = loop.create_task(_call_on_disconnect(receive, self._leave))

    def __enter__(self) -> None:
        if self._on_disconnect is not None:
            self._on_disconnect(self._leave)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        """Only a cancellation that is ours ends here."""
        if self._watch is not None:
            self._watch.cancel()
        elif self._on_disconnect is not None:
            self._on_disconnect(None)
        return self._has_left and self._task.uncancel() == 0 and kind is asyncio.CancelledError

    def _leave(self) -> None:
        self._has_left = True
        self._task.cancel()


async def _call_on_disconnect(receive: Receive, leave: Callable[[], None]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    leave()
