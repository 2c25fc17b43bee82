"""How one answer is read: whole or as a stream, as bytes or as meaning. Decided by what came."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from plugins.errors import UpstreamUnavailable
from plugins.events import Event, Finished, Request, Started, Verbatim
from plugins.interfaces import Call
from plugins.providers.lenient_json import a_text, an_object, parse_json
from plugins.providers.openai_answer import AnswerReader
from plugins.providers.openai_calls import new_id
from plugins.providers.openai_embeddings import (
    BadEmbeddings,
    read_embeddings,
    verbatim_embeddings,
)
from plugins.providers.openai_errors import ErrorReader, is_error
from plugins.providers.openai_state import AnswerState
from plugins.providers.openai_stream import StreamReader
from plugins.providers.openai_text_lane import TextLane
from plugins.providers.openai_verbatim import VerbatimLane
from plugins.providers.openai_wire import (
    FINISH_REASONS,
    ODD,
    ChatAnswer,
    Counts,
    TextAnswer,
    decode_chat_answer,
    decode_text_answer,
    started_of,
    usage_of,
)

_SSE_STARTS = (b"data", b"event", b"id", b"retry", b":")


def shape_of(start: bytes, headers: Mapping[bytes, bytes]) -> Literal["json", "stream", "neither"]:
    """Servers send JSON as an event stream and the other way round: the first bytes decide, then the content type."""
    start = start.lstrip(b"\xef\xbb\xbf \t\r\n")
    if start[:1] in (b"{", b"["):
        return "json"
    if start[:1] == b"<":
        return "neither"
    if b"event-stream" in headers.get(b"content-type", b"").lower() or start.startswith(
        _SSE_STARTS
    ):
        return "stream"
    return "neither"


class AnswerFormat:
    """Reads the answer to one request."""

    def __init__(
        self,
        provider: str,
        request: Request,
        call: Call,
        errors: ErrorReader,
        wall_clock: Callable[[], float],
    ) -> None:
        self._provider = provider
        self._request = request
        self._call = call
        self._errors = errors
        self._wall_clock = wall_clock

    def stream_reader(self) -> StreamReader:
        request = self._request
        state = AnswerState()
        verbatim = self._call.verbatim and request.stream
        return StreamReader(
            provider=self._provider,
            num_choices=request.sampling.n * max(1, len(request.prompts)),
            state=state,
            lane=(VerbatimLane if verbatim else TextLane)(request.dialect, state),
            answer=self._answer_reader(state),
            errors=self._errors,
        )

    def read_body(self, body: bytes) -> list[Event]:
        """A whole JSON answer.

        Raises:
            UpstreamError: it says that something failed.
            UpstreamUnavailable: it is not JSON, or there is no answer in it.
        """
        if self._request.dialect == "embeddings":
            return self._read_embeddings(body)
        if self._call.verbatim and not self._request.stream:
            events = self._read_verbatim(body)
            if events is not None:
                return events
        document = self._parse(body)
        answer = self._answer_reader(AnswerState())
        events = answer.read(an_object(document))
        if not events:
            raise self.unusable()
        return events + answer.end()

    def _read_verbatim(self, body: bytes) -> list[Event] | None:
        """The body as it is, if it is canonical."""
        try:
            chat = self._request.dialect == "chat"
            answer: ChatAnswer | TextAnswer = (
                decode_chat_answer(body) if chat else decode_text_answer(body)
            )
        except ODD:
            return None
        finished = tuple(
            Finished(FINISH_REASONS[choice.finish_reason], choice.index)
            for choice in answer.choices
        )
        return _verbatim(started_of(answer), body, finished, answer.usage)

    def _read_embeddings(self, body: bytes) -> list[Event]:
        model = self._call.upstream_model
        events = verbatim_embeddings(body, self._request) if self._call.verbatim else None
        if events is None:
            document = an_object(self._parse(body))
            model = a_text(document.get("model")) or model
            try:
                events = read_embeddings(document, len(self._request.prompts))
            except BadEmbeddings as exc:
                raise UpstreamUnavailable(f"provider {self._provider}: {exc}") from None
        return [Started(new_id("embd-"), model, int(self._wall_clock())), *events]

    def _parse(self, body: bytes) -> Any:
        try:
            document = parse_json(body)
        except ValueError:
            raise self.unusable() from None
        if is_error(an_object(document)):
            raise self._errors.from_document(document)
        return document

    def unusable(self) -> UpstreamUnavailable:
        return UpstreamUnavailable(
            f"provider {self._provider}: answered with status 200, but without a usable answer"
        )

    def _answer_reader(self, state: AnswerState) -> AnswerReader:
        prefix = "cmpl-" if self._request.dialect == "completions" else "chatcmpl-"
        model = self._call.upstream_model
        return AnswerReader(self._provider, model, prefix, state, self._wall_clock)


def _verbatim(
    started: Started, body: bytes, finished: tuple[Finished, ...], usage: Counts | None
) -> list[Event]:
    events: list[Event] = [started, Verbatim(body, True, len(finished), finished)]
    if usage is not None:
        events.append(usage_of(usage))
    return events
