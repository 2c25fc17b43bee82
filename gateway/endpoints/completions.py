"""POST /v1/completions."""

from __future__ import annotations

from gateway.endpoints.completions_encode import CompletionsCollector, CompletionsStreamEncoder
from gateway.endpoints.completions_request import decode_completions
from gateway.errors import openai_error_body
from plugins.errors import GatewayError
from plugins.events import Dialect, Request


class CompletionsEndpoint:
    """The completions dialect: see `gateway.endpoints.dialect.Endpoint`."""

    dialect: Dialect = "completions"

    def decode(self, body: bytes, request_id: str, received_s: float) -> Request:
        return decode_completions(body, request_id, received_s)

    def stream_encoder(self, request: Request) -> CompletionsStreamEncoder:
        return CompletionsStreamEncoder(request)

    def collector(self, request: Request) -> CompletionsCollector:
        return CompletionsCollector(request)

    def error_body(self, error: GatewayError) -> bytes:
        return openai_error_body(error)
