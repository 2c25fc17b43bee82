"""POST /v1/embeddings: body -> Request. The input is text or token ids, one or many."""

from __future__ import annotations

from msgspec import Struct

from gateway.endpoints.generation_body import PositiveCount
from gateway.endpoints.json_body import BodyReader, without_bom
from gateway.endpoints.openai_validation import invalid_value, too_long_array, unknown_value
from gateway.endpoints.text_or_ids import TextOrIds, read_text_or_ids
from plugins.errors import InvalidRequest
from plugins.events import EmbeddingForm, Request

MAX_INPUTS = 2048
FORMATS = ("float", "base64")


class EmbeddingsBody(Struct, kw_only=True):
    model: str | None = None
    input: TextOrIds | None = None
    encoding_format: str | None = None
    dimensions: PositiveCount | None = None
    user: str | None = None
    stream: bool | None = None


_reader = BodyReader(EmbeddingsBody)


def decode_embeddings(body: bytes, request_id: str, received_s: float) -> Request:
    """Raises InvalidRequest. The inputs become `prompts`."""
    body = without_bom(body)
    embeddings, extra = _reader.read(body)
    if not embeddings.model:
        raise InvalidRequest("you must provide a model parameter")
    if embeddings.stream:
        raise never_streamed()
    return Request(
        id=request_id,
        dialect="embeddings",
        model=embeddings.model,
        prompts=_read_inputs(embeddings.input),
        embedding=_read_form(embeddings),
        user=embeddings.user,
        extra=extra,
        body=body,
        received_s=received_s,
    )


def _read_inputs(value: TextOrIds | None) -> list[str | list[int]]:
    inputs = read_text_or_ids("input", value)
    if len(inputs) > MAX_INPUTS:
        raise too_long_array("input", MAX_INPUTS, len(inputs))
    if "" in inputs:
        path = "input" if value == "" else f"input[{inputs.index('')}]"
        raise invalid_value(path, "an empty string has no embedding.")
    return inputs


def _read_form(body: EmbeddingsBody) -> EmbeddingForm:
    if body.encoding_format not in (None, *FORMATS):
        raise unknown_value("encoding_format", body.encoding_format, FORMATS)
    return EmbeddingForm(body.dimensions, body.encoding_format or "float")


def never_streamed() -> InvalidRequest:
    return invalid_value("stream", "embeddings are never streamed.")
