"""What each public API brings to the pipeline: a decoder of its bodies, and two encoders of the same events.

`gateway/endpoints/inference.py` serves any object of this shape.
"""

from __future__ import annotations

from typing import Protocol

from plugins.errors import GatewayError
from plugins.events import Dialect, Event, Request


class StreamEncoder(Protocol):
    """Events of one answer -> bytes of one SSE response. Built per request; keeps what the dialect must repeat."""

    content_type: str

    @property
    def finished(self) -> bool:
        """True once every choice that began has ended (and at least one did): only then may `end` follow."""
        ...

    def encode(self, events: list[Event]) -> bytes:
        """The SSE bytes of one batch; b"" where the batch has nothing to show."""
        ...

    def end(self) -> bytes:
        """The usage chunk, if asked for, and what closes the stream. Called once, after the last batch.

        Raises:
            UpstreamUnavailable: nothing finished, or a choice that began did not; `error` must close the stream.
        """
        ...

    def error(self, error: GatewayError) -> bytes:
        """One error event in the dialect, and what closes the stream. Nothing follows it."""
        ...


class Collector(Protocol):
    """Events of one answer -> one JSON body."""

    def add(self, events: list[Event]) -> None: ...

    def body(self) -> bytes:
        """The whole answer.

        Raises:
            UpstreamUnavailable: the events hold no usable answer: nothing finished, or a choice that did not.
        """
        ...


class Endpoint(Protocol):
    """One public API: how its bodies are read, and how its answers and errors are written."""

    dialect: Dialect

    def decode(self, body: bytes, request_id: str, received_s: float) -> Request:
        """Read a request body.

        Raises:
            InvalidRequest: whatever is wrong with it, in the dialect's words, with `param` and `code`.
        """
        ...

    def stream_encoder(self, request: Request) -> StreamEncoder:
        """Asked for only where `decode` let a request say `stream`."""
        ...

    def collector(self, request: Request) -> Collector: ...

    def error_body(self, error: GatewayError) -> bytes:
        """The JSON body of an error answer."""
        ...
