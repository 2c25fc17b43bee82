"""POST /v1/embeddings."""

from __future__ import annotations

from gateway.endpoints.dialect import StreamEncoder
from gateway.endpoints.embeddings_encode import EmbeddingsCollector
from gateway.endpoints.embeddings_request import decode_embeddings, never_streamed
from gateway.errors import openai_error_body
from plugins.errors import GatewayError
from plugins.events import Dialect, Request


class EmbeddingsEndpoint:
    """The embeddings dialect: see `gateway.endpoints.dialect.Endpoint`."""

    dialect: Dialect = "embeddings"

    def decode(self, body: bytes, request_id: str, received_s: float) -> Request:
        return decode_embeddings(body, request_id, received_s)

    def stream_encoder(self, request: Request) -> StreamEncoder:
        raise never_streamed()  # `decode` lets none come here

    def collector(self, request: Request) -> EmbeddingsCollector:
        return EmbeddingsCollector(request)

    def error_body(self, error: GatewayError) -> bytes:
        return openai_error_body(error)
