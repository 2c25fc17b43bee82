"""What a gateway process and an engine worker say to each other: length-prefixed msgpack messages.

A frame is 4 bytes of big-endian length and one message. The gateway opens with `Hello`, the worker answers `Ready`;
then `Generate` and `Abort` go one way, `Accepted`, `Rejected`, `Deltas` and `Stats` the other. A request's id is
chosen by the gateway and is unique on its connection; closing the connection aborts everything asked on it.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from backend.engine.grammar_spec import GrammarSpec
from backend.engine.params import (
    EmbeddingParams,
    FinishReason,
    Objective,
    RequestClass,
    SamplingParams,
)

VERSION = 1
MAX_FRAME_BYTES = 256 << 20
_PREFIX_BYTES = 4
_T = TypeVar("_T")


class ProtocolError(Exception):
    """The other side speaks another version, or bytes that are no message: the connection must close."""


# -- gateway -> worker -----------------------------------------------------------------------------------------------


class Hello(msgspec.Struct, tag="hello"):
    version: int = VERSION


class Generate(msgspec.Struct, tag="generate", omit_defaults=True):
    """One request. `messages` go through the chat template, `prompts` do not; `n` choices for each prompt.

    Choice `index = prompt index * n + k`. With `best_of` above `n` so many are generated and the best `n` sent, whole.
    With `embedding` nothing is generated: each prompt becomes a vector, its only `Delta`.
    """

    request_id: int
    params: SamplingParams
    messages: list[dict[str, Any]] | None = None
    prompts: list[str | list[int]] = msgspec.field(default_factory=list["str | list[int]"])
    tools: list[dict[str, Any]] | None = None
    template_kwargs: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])
    continue_final_message: bool = False
    n: int = 1
    best_of: int = 0  # 0: n
    klass: RequestClass = RequestClass.STANDARD
    objective: Objective = Objective()
    cache_salt: bytes = b""
    echo: bool = False
    grammar: GrammarSpec | None = None
    must_call: list[str] = msgspec.field(default_factory=list[str])  # tools; one of them is called
    parallel_calls: bool = True
    embedding: EmbeddingParams | None = None

    @property
    def rows_per_prompt(self) -> int:
        return max(self.n, self.best_of)


class Abort(msgspec.Struct, tag="abort"):
    request_id: int


# -- worker -> gateway -----------------------------------------------------------------------------------------------


class Ready(msgspec.Struct, tag="ready"):
    model: str
    fingerprint: str  # changes with the weights, their number format and ours
    max_model_len: int
    vocab_size: int
    num_blocks: int
    version: int = VERSION
    tool_notation: str = ""  # as in tool_parser.py
    reasons: bool = False  # answers may begin with a reasoning block, which the gateway tells apart


class Accepted(msgspec.Struct, tag="accepted"):
    """The request is in the engine. Its prompts are counted once, whatever `n`."""

    request_id: int
    num_prompt_tokens: int
    in_reasoning: bool = False  # the prompt has opened a reasoning block


class Rejected(msgspec.Struct, tag="rejected", omit_defaults=True):
    """The request never reached the engine loop. `status` is the HTTP status it deserves."""

    request_id: int
    message: str
    param: str | None = None
    code: str | None = None
    status: int = 400


class TopLogprob(msgspec.Struct, array_like=True):
    token: str
    data: bytes
    logprob: float


class Logprob(msgspec.Struct, array_like=True):
    token: str
    data: bytes
    logprob: float  # NaN: the first token of an echoed prompt
    top: list[TopLogprob]
    text_offset: int  # where the token begins in the choice's text, in characters


class Delta(msgspec.Struct, array_like=True):
    """What one engine step added to one choice. `finish_reason` is there in the last of a choice."""

    request_id: int
    index: int
    text: str
    num_output_tokens: int  # so far
    num_cached_tokens: int  # prompt tokens that the prefix cache saved
    logprobs: list[Logprob] = msgspec.field(default_factory=list[Logprob])
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str = ""
    num_draft_tokens: int = 0  # guessed so far
    num_accepted_tokens: int = 0  # of those, right
    embedding: bytes = b""  # float32, little-endian


class Deltas(msgspec.Struct, tag="deltas"):
    """Everything one engine step made for this connection."""

    items: list[Delta]


class Stats(msgspec.Struct, tag="stats"):
    """Once a second while the engine works, and when it goes idle. Counters run since the worker's start."""

    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int
    num_preemptions: int
    num_cached_tokens: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_evictions: int = 0
    running_by_class: tuple[int, ...] = (0,) * len(RequestClass)  # most urgent class first
    waiting_by_class: tuple[int, ...] = (0,) * len(RequestClass)


ToWorker = Hello | Generate | Abort
ToGateway = Ready | Accepted | Rejected | Deltas | Stats
_encoder = msgspec.msgpack.Encoder()
_to_worker = msgspec.msgpack.Decoder(ToWorker)
_to_gateway = msgspec.msgpack.Decoder(ToGateway)


def encode_frame(message: msgspec.Struct) -> bytearray:
    """Raises ProtocolError when the message is larger than MAX_FRAME_BYTES."""
    frame = bytearray(_PREFIX_BYTES)
    _encoder.encode_into(message, frame, _PREFIX_BYTES)
    size = len(frame) - _PREFIX_BYTES
    if size > MAX_FRAME_BYTES:
        raise ProtocolError(f"a message of {size} bytes; the limit is {MAX_FRAME_BYTES}")
    frame[:_PREFIX_BYTES] = size.to_bytes(_PREFIX_BYTES, "big")
    return frame


def decode_to_worker(payload: bytes) -> ToWorker:
    return _decode(_to_worker, payload)


def decode_to_gateway(payload: bytes) -> ToGateway:
    return _decode(_to_gateway, payload)


def _decode(decoder: msgspec.msgpack.Decoder[_T], payload: bytes) -> _T:
    try:
        return decoder.decode(payload)
    except msgspec.MsgspecError as exc:
        raise ProtocolError(f"not a message: {exc}") from exc


class FrameReader:
    """Cuts a byte stream into payloads, wherever the reads happened to split it."""

    def __init__(self, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self._max_frame_bytes = max_frame_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Payloads that are complete now. Raises ProtocolError at a length above the limit, before storing it."""
        self._buffer += data
        payloads: list[bytes] = []
        start = 0
        while len(self._buffer) - start >= _PREFIX_BYTES:
            body = start + _PREFIX_BYTES
            size = int.from_bytes(self._buffer[start:body], "big")
            if size > self._max_frame_bytes:
                raise ProtocolError(
                    f"a frame of {size} bytes; the limit is {self._max_frame_bytes}"
                )
            if len(self._buffer) < body + size:
                break
            payloads.append(bytes(self._buffer[body : body + size]))
            start = body + size
        del self._buffer[:start]
        return payloads
