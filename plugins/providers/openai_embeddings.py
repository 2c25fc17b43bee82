"""Embeddings answers as servers give them: untouched where they fit what was asked, else read into vectors."""

from __future__ import annotations

import base64
import math
from typing import Any

from plugins.events import Embedding, Event, Finished, Json, Request, Verbatim
from plugins.providers.lenient_json import objects
from plugins.providers.openai_usage import read_usage
from plugins.providers.openai_wire import ODD, decode_embeddings_answer, usage_of

_FIRST_BYTE = {"float": ord("["), "base64": ord('"')}
_EMPTY = len("[]")
_BYTES_PER_NUMBER = 4


class BadEmbeddings(ValueError):
    """An answer without one vector for each input; the message says what is wrong with it."""


def verbatim_embeddings(body: bytes, request: Request) -> list[Event] | None:
    """The body as it is, where it holds every input's vector, in order and in the form that was asked for."""
    try:
        answer = decode_embeddings_answer(body)
    except ODD:
        return None
    if [entry.index for entry in answer.data] != list(range(len(request.prompts))):
        return None
    first_byte = _FIRST_BYTE[request.embedding.encoding_format]
    for entry in answer.data:
        if memoryview(entry.embedding)[0] != first_byte or len(entry.embedding) <= _EMPTY:
            return None
    passed = Verbatim(body, num_chunks=0, finished=(Finished("stop"),))
    return [passed, usage_of(answer.usage)]


def read_embeddings(document: Json, num_inputs: int) -> list[Event]:
    """Vectors in the order of their indexes; one without an index stands where its input does.

    Raises:
        BadEmbeddings
    """
    vectors: dict[int, Embedding] = {}
    entries = objects(document.get("data"))
    for position, entry in enumerate(entries):
        index = entry.get("index", position)
        if not isinstance(index, int) or isinstance(index, bool) or index in vectors:
            raise BadEmbeddings(f"gave embedding number {position} the index {index!r}"[:100])
        vectors[index] = _read_vector(entry.get("embedding"), index)
    if vectors.keys() != set(range(num_inputs)):
        raise BadEmbeddings(f"answered {num_inputs} inputs with {len(entries)} embeddings")
    events: list[Event] = [vectors[index] for index in range(num_inputs)]
    events.append(Finished("stop"))
    if (usage := read_usage(document.get("usage"))) is not None:
        events.append(usage)
    return events


def _read_vector(value: Any, index: int) -> Embedding:
    """As float32, which is what models compute in."""
    try:
        vector = _decode(value, index) if isinstance(value, str) else Embedding.of(value, index)
        # One sum tells: it is finite where all numbers are, for no count of float32 comes near float64's end.
        if vector.data and math.isfinite(sum(vector.values())):
            return vector
    except (TypeError, ValueError, OverflowError):
        pass
    raise BadEmbeddings(f"gave an embedding of index {index} that is no list of numbers")


def _decode(text: str, index: int) -> Embedding:
    data = base64.b64decode(text, validate=True)
    if len(data) % _BYTES_PER_NUMBER:
        raise ValueError("a number is cut")
    return Embedding(data, index)
