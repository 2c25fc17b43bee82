"""How the tests open an HTTP client and fetch with it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from plugins.interfaces import Timeout
from plugins.providers.http_client import HTTPClient
from plugins.providers.http_message import parse_base_url
from tests.plugins.fake_upstream import (
    answer,
)

PATIENT = Timeout()
OK = answer("hello")


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
