"""One table from error to answer: status, headers and the dialect's own envelope."""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from plugins.errors import GatewayError, UpstreamError
from plugins.events import Failed

RETRIES_POINTLESS = frozenset({"insufficient_quota"})
_encoder = msgspec.json.Encoder()


def openai_error_body(error: GatewayError) -> bytes:
    """`{"error": {message, type, param, code}}`: all four keys always there."""
    fields = {
        "message": error.message,
        "type": error.type,
        "param": error.param,
        "code": error.code,
    }
    return _encoder.encode({"error": fields})


def error_headers(error: GatewayError) -> list[tuple[bytes, bytes]]:
    """Retry-After in whole seconds for everybody, `retry-after-ms` for the official clients."""
    headers: list[tuple[bytes, bytes]] = []
    if error.retry_after_s is not None:
        headers.append((b"retry-after", str(math.ceil(error.retry_after_s)).encode()))
        headers.append((b"retry-after-ms", str(int(error.retry_after_s * 1000)).encode()))
    if error.code in RETRIES_POINTLESS:
        headers.append((b"x-should-retry", b"false"))
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    return headers


def as_error(failed: Failed) -> UpstreamError:
    """A provider may tell its failure as an event; from here on there is one way to fail."""
    return UpstreamError(failed.message, type=failed.type, code=failed.code, status=failed.status)


ErrorBody = Callable[[GatewayError], bytes]
