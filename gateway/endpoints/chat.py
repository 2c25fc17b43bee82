"""POST /v1/chat/completions."""

from __future__ import annotations

from gateway.endpoints.chat_collect import ChatCollector
from gateway.endpoints.chat_encode import ChatStreamEncoder
from gateway.endpoints.chat_request import decode_chat
from gateway.errors import openai_error_body
from plugins.errors import GatewayError
from plugins.events import Dialect, Request


class ChatEndpoint:
    """The chat dialect: see `gateway.endpoints.dialect.Endpoint`."""

    dialect: Dialect = "chat"

    def decode(self, body: bytes, request_id: str, received_s: float) -> Request:
        return decode_chat(body, request_id, received_s)

    def stream_encoder(self, request: Request) -> ChatStreamEncoder:
        return ChatStreamEncoder(request)

    def collector(self, request: Request) -> ChatCollector:
        return ChatCollector(request)

    def error_body(self, error: GatewayError) -> bytes:
        return openai_error_body(error)
