"""The HTTP side of every endpoint that asks a model: key, body, decode, run the pipeline, encode, send."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from contextlib import aclosing

import anyio
from starlette.types import Receive, Scope, Send

from gateway.auth import Authenticator
from gateway.endpoints.asgi import (
    JSON,
    CancelledWhenClientLeaves,
    ClientGone,
    Headers,
    check_json_content_type,
    read_body,
    send_body,
    send_error,
)
from gateway.endpoints.dialect import Endpoint
from gateway.pipeline import Pipeline
from gateway.streaming import STREAM_HEADERS
from plugins.errors import GatewayError, MethodNotAllowed, Overloaded
from plugins.events import Request
from plugins.interfaces import Principal

log = logging.getLogger("tidegate")


# Seeded by the system once: an id must be unique, not secret, and asking the system for each costs 7 us.
_ids = random.Random()


def new_request_id() -> str:
    return f"req_{_ids.getrandbits(128):032x}"


class InferenceEndpoint:
    """One public API as an ASGI app: a dialect in front of the pipeline.

    The key is checked before the body is read, so that strangers cannot make the gateway hold megabytes.
    """

    def __init__(
        self,
        dialect: Endpoint,
        pipeline: Pipeline,
        authenticator: Authenticator,
        max_body_bytes: int,
        on_refused: Callable[[str, int], None],
    ) -> None:
        """`on_refused(dialect, status)` hears of requests that do not come to a usage row."""
        self.authenticator = authenticator
        self._dialect = dialect
        self._pipeline = pipeline
        self._max_body_bytes = max_body_bytes
        self._on_refused = on_refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = new_request_id()
        headers: Headers = [(b"x-request-id", request_id.encode())]
        accepted = False
        try:
            if scope["method"] != "POST":
                raise MethodNotAllowed(
                    f"Not allowed to {scope['method']} on {scope['path'][:200]}."
                )
            principal = self.authenticator.check(scope["headers"])
            check_json_content_type(scope)
            body = await read_body(scope, receive, self._max_body_bytes)
            request = self._dialect.decode(body, request_id, time.monotonic())
            accepted = True
            with CancelledWhenClientLeaves(scope, receive):
                if request.stream:
                    await self._stream(request, principal, send, headers)
                else:
                    await self._collect(request, principal, send, headers)
        except GatewayError as error:
            if not accepted:
                self._on_refused(self._dialect.dialect, error.status)
            await send_error(send, error, headers, self._dialect.error_body)
        except ClientGone:
            pass
        except asyncio.CancelledError:
            # The server stops and waits no longer; a stream has been told.
            log.warning("request %s was cut off by the shutdown", request_id)
        except Exception:
            log.exception("request %s failed inside the gateway", request_id)
            error = GatewayError("The gateway failed on this request.", code="internal_error")
            await send_error(send, error, headers, self._dialect.error_body)

    async def _collect(
        self, request: Request, principal: Principal, send: Send, headers: Headers
    ) -> None:
        collector = self._dialect.collector(request)
        async with aclosing(self._pipeline.run(request, principal)) as events:
            async for batch in events:
                collector.add(batch)
        body = collector.body()
        await send_body(send, 200, [JSON, *headers, _processing_ms(request)], body)

    async def _stream(
        self, request: Request, principal: Principal, send: Send, headers: Headers
    ) -> None:
        """The 200 is sent with the first content: until then a failure still has its real status."""
        encoder = self._dialect.stream_encoder(request)
        started = False
        async with aclosing(self._pipeline.run(request, principal)) as events:
            try:
                async for batch in events:
                    data = encoder.encode(batch)
                    if not started:
                        started = True
                        start_headers = [*STREAM_HEADERS, *headers, _processing_ms(request)]
                        await send(
                            {
                                "type": "http.response.start",
                                "status": 200,
                                "headers": start_headers,
                            }
                        )
                    if data:
                        await send({"type": "http.response.body", "body": data, "more_body": True})
                tail = encoder.end()
            except GatewayError as error:
                if not started:
                    raise
                tail = encoder.error(error)
            except asyncio.CancelledError:
                # The client left, and hears nothing; or the server stops: a cut stream would look like a whole one.
                if started:
                    stopping = Overloaded("The server is shutting down.", code="shutting_down")
                    with anyio.CancelScope(shield=True):
                        await send({"type": "http.response.body", "body": encoder.error(stopping)})
                raise
        await send({"type": "http.response.body", "body": tail})


def _processing_ms(request: Request) -> tuple[bytes, bytes]:
    elapsed_ms = (time.monotonic() - request.received_s) * 1000
    return b"openai-processing-ms", str(int(elapsed_ms)).encode()
