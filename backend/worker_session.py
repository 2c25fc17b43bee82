"""One gateway process, as the worker sees it: its connection, and what it has asked for."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, cast

import msgspec

from backend.best_of import BestOf
from backend.logprobs import LogprobGate
from backend.prompts import Prompt, PromptReader, Refused
from backend.protocol import (
    VERSION,
    Abort,
    FrameReader,
    Generate,
    Hello,
    ProtocolError,
    Rejected,
    decode_to_worker,
    encode_frame,
)

if TYPE_CHECKING:
    from backend.worker_server import WorkerServer

MAX_BACKLOG_BYTES = 64 << 20  # a gateway that reads no more is cut off, its requests aborted
logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class LiveRequest:
    """One `Generate` that has not ended. `choices` maps engine rows to their index; empty while it is read."""

    session: Session
    message: Generate
    choices: dict[str, Choice] = field(default_factory=dict[str, "Choice"])


@dataclass(slots=True, eq=False)
class Choice:
    request: LiveRequest
    index: int  # of its candidate, where there are more than are shown
    gate: LogprobGate | None
    echo: str = ""  # the prompt's text, until it has left with the first output
    ranking: BestOf | None = None


class Session(asyncio.Protocol):
    """One gateway process. When its connection ends, so does everything it asked for."""

    def __init__(self, server: WorkerServer, number: int) -> None:
        self._server = server
        self._number = number
        self._frames = FrameReader()
        self._live: dict[int, LiveRequest] = {}
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are not subclasses

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        live, self._live = list(self._live.values()), {}
        self._server.leave(self, live)

    def data_received(self, data: bytes) -> None:
        try:
            for payload in self._frames.feed(data):
                self._receive(decode_to_worker(payload))
        except ProtocolError as exc:
            logger.error("a connection is closed: %s", exc)
            self.close()

    def send(self, message: msgspec.Struct) -> None:
        if self._transport is None:
            return
        self._transport.write(encode_frame(message))
        if self._transport.get_write_buffer_size() > MAX_BACKLOG_BYTES:
            logger.error("a gateway process reads no more: its connection is closed")
            self._transport.abort()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def owns(self, request: LiveRequest) -> bool:
        return self._live.get(request.message.request_id) is request

    def ended(self, request: LiveRequest) -> None:
        del self._live[request.message.request_id]

    def reject(self, request: LiveRequest, refusal: Refused) -> None:
        self.ended(request)
        self.send(refusal.reply(request.message.request_id))

    def _receive(self, message: Hello | Generate | Abort) -> None:
        if isinstance(message, Hello):
            if message.version != VERSION:
                raise ProtocolError(f"protocol version {message.version}; ours is {VERSION}")
            self._server.greet(self)
        elif isinstance(message, Generate):
            self._generate(message)
        elif (request := self._live.pop(message.request_id, None)) is not None:
            self._server.abort(request)

    def _generate(self, message: Generate) -> None:
        if message.request_id in self._live:
            raise ProtocolError(f"request id {message.request_id} is used twice")
        request = LiveRequest(self, message)
        self._live[message.request_id] = request
        if not _is_long(self._server.reader, message):
            self._admit(request, _read(self._server.reader, message))
            return
        reading = asyncio.get_running_loop().run_in_executor(
            self._server.long_prompts, _read, self._server.reader, message
        )
        reading.add_done_callback(partial(self._long_prompt_read, request))

    def _long_prompt_read(
        self, request: LiveRequest, reading: asyncio.Future[list[Prompt] | Rejected]
    ) -> None:
        if not reading.cancelled():
            self._admit(request, reading.result())

    def _admit(self, request: LiveRequest, prompts: list[Prompt] | Rejected) -> None:
        if not self.owns(request):
            return  # aborted while it was read
        if isinstance(prompts, Rejected):
            self.ended(request)
            self.send(prompts)
        else:
            self._server.admit(request, prompts, f"{self._number}:{request.message.request_id}:")


def _is_long(reader: PromptReader, message: Generate) -> bool:
    try:
        return reader.is_long(message)
    except Exception:
        return False  # `_read` meets the same fault, and answers it


def _read(reader: PromptReader, message: Generate) -> list[Prompt] | Rejected:
    try:
        return reader.read(message)
    except Refused as refusal:
        return refusal.reply(message.request_id)
    except Exception:  # ours to mend; it must not take the connection's other requests with it
        logger.exception("a prompt could not be read")
        text = "the engine could not read the prompt: see its log"
        return Rejected(message.request_id, text, status=500)
