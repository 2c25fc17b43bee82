"""A pooled HTTP/1.1 client for one origin, made for relaying: prebuilt heads, bodies as bytes, answers piece by piece.

Not here, because relaying needs none of it: redirects, cookies, HTTP/2, proxies. HTTP/1.1 is RFC 9112.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Mapping

from plugins.errors import UpstreamTimeout, UpstreamUnavailable
from plugins.interfaces import Timeout
from plugins.providers.connection_pool import ConnectionPool
from plugins.providers.http_connection import Connection, ConnectionLost
from plugins.providers.http_message import BaseURL
from plugins.providers.http_response import Response

_log = logging.getLogger("tidegate.providers")


class HTTPClient:
    """Requests to one base URL. Belongs to the event loop in which it was made.

    `name` is what errors call the other side: they never tell its address. `ssl_context` defaults to the system's
    certificate authorities; server names are checked and sent (SNI).
    """

    def __init__(
        self,
        name: str,
        base_url: BaseURL,
        timeout: Timeout,
        ssl_context: ssl.SSLContext | None = None,
        pool: ConnectionPool | None = None,
    ) -> None:
        self._name = name
        self._base_url = base_url
        self._timeout = timeout
        self._loop = asyncio.get_running_loop()
        self._pool = ConnectionPool(self._loop) if pool is None else pool
        self._starts: dict[tuple[str, str], bytes] = {}
        self._tls: ssl.SSLContext | None = None
        if base_url.tls:
            self._tls = ssl.create_default_context() if ssl_context is None else ssl_context

    async def request(
        self, method: str, path: str, headers: bytes, body: bytes, first_byte_s: float | None = None
    ) -> Response:
        """Send one request; returns when status and headers are there. The caller closes the response.

        `path` is below the base URL. `headers` are whole lines (`http_message.header_lines`), without Host and
        Content-Length. A pooled connection that dies before any byte of the answer is replaced by a fresh one, once.

        Raises:
            UpstreamUnavailable: no connection, or it broke, or what came is no HTTP answer.
            UpstreamTimeout: no connection within `connect_s`, or no head within `first_byte_s` or `total_s`.
        """
        start = self._starts.get((method, path))
        if start is None:
            start = self._starts[method, path] = self._start(method, path)
        head = b"%b%d\r\n%b\r\n" % (start, len(body), headers)
        wait_s = self._timeout.first_token_s if first_byte_s is None else first_byte_s
        connection = self._pool.take()
        if connection is not None:
            try:
                return await self._exchange(connection, head, body, wait_s)
            except ConnectionLost as exc:
                if not exc.stale:
                    raise
        return await self._exchange(await self._connect(), head, body, wait_s)

    def stats(self) -> Mapping[str, float]:
        return {
            "connections_active": self._pool.num_active,
            "connections_idle": self._pool.num_idle,
        }

    async def aclose(self) -> None:
        """Close every connection at once; answers in flight end in UpstreamUnavailable."""
        self._pool.close()
        await asyncio.sleep(0)  # the transports' own last callbacks

    def _start(self, method: str, path: str) -> bytes:
        url = self._base_url
        return (
            f"{method} {url.target(path)} HTTP/1.1\r\nHost: {url.authority}\r\nContent-Length: "
        ).encode("ascii")

    async def _exchange(
        self, connection: Connection, head: bytes, body: bytes, first_byte_s: float
    ) -> Response:
        response = Response(connection, self._loop, self._name, self._timeout, first_byte_s)
        try:
            connection.send(response, head, body)
            await response.head()
        except BaseException:
            response.close()
            raise
        return response

    async def _connect(self) -> Connection:
        base_url = self._base_url
        try:
            async with asyncio.timeout(self._timeout.connect_s):
                _, connection = await self._loop.create_connection(
                    lambda: Connection(self._pool, self._loop, self._name),
                    base_url.host,
                    base_url.port,
                    ssl=self._tls,
                    server_hostname=base_url.host if self._tls is not None else None,
                )
        except TimeoutError as exc:
            raise UpstreamTimeout(
                f"provider {self._name}: no connection within {self._timeout.connect_s:g} s"
            ) from exc
        except OSError as exc:
            _log.info("provider %s: no connection: %s", self._name, exc)
            raise UpstreamUnavailable(f"provider {self._name}: {_reason(exc)}") from exc
        self._pool.add(connection)
        return connection


def _reason(exc: OSError) -> str:
    """Why there is no connection, in words that tell no address."""
    if isinstance(exc, ssl.SSLCertVerificationError):
        return f"its TLS certificate is not accepted: {exc.verify_message}"
    if isinstance(exc, ssl.SSLError):
        return "the TLS handshake failed"
    if isinstance(exc, socket.gaierror):
        return "its host name cannot be resolved"
    if isinstance(exc, ConnectionRefusedError):
        return "nothing listens at its address"
    return "no connection to its address"
