"""From the worker's messages about one request to the gateway's events."""

from __future__ import annotations

import hashlib
import secrets
import time

from backend.answer_text import AnswerText
from backend.protocol import Accepted, Delta, Logprob, Ready, Rejected
from backend.reasoning import ReasoningSplitter
from backend.request import usable_tools
from backend.tool_parser import CallParser
from plugins.errors import (
    ContextLengthExceeded,
    GatewayError,
    InvalidRequest,
    Unsupported,
    UpstreamError,
)
from plugins.events import (
    Event,
    Finished,
    Request,
    Started,
    TextDelta,
    TokenLogprob,
    Usage,
)


class Answer:
    """Builds the events of one answer. `done`: nothing more comes, for it is complete or the worker refused it."""

    def __init__(self, request: Request, model: str, ready: Ready) -> None:
        self.done = False
        self.has_content = False
        self._completions = request.dialect == "completions"
        self._model = model
        self._fingerprint = fingerprint(ready)
        self._ready = ready
        self._request = request
        self._texts: dict[int, AnswerText] = {}  # by choice; none: the text is the answer as it is
        self._in_reasoning = False  # where each choice begins
        self._num_reasoning_tokens = 0
        self._n = request.sampling.n
        self._num_open = self._n * (len(request.prompts) if self._completions else 1)
        self._num_prompt_tokens = 0
        self._num_output_tokens: dict[int, int] = {}
        self._num_cached_tokens: dict[int, int] = {}
        self._guesses: dict[int, tuple[int, int]] = {}  # right, wrong

    def read(self, messages: list[Accepted | Rejected | Delta]) -> list[Event]:
        """Events of messages that came together. Raises GatewayError where the worker refused or failed."""
        events: list[Event] = []
        for message in messages:
            if isinstance(message, Delta):
                self._read_delta(message, events)
            elif isinstance(message, Accepted):
                self._num_prompt_tokens = message.num_prompt_tokens
                self._in_reasoning = message.in_reasoning
                self._texts = self._new_texts()
                events.append(self._started())
            else:
                self.done = True
                raise refusal(message)
        if self._num_open == 0:
            self.done = True
            events.append(self._usage())
        return events

    def _started(self) -> Started:
        prefix = "cmpl-" if self._completions else "chatcmpl-"
        return Started(
            prefix + secrets.token_hex(12), self._model, int(time.time()), self._fingerprint
        )

    def _read_delta(self, delta: Delta, events: list[Event]) -> None:
        reason = delta.finish_reason
        if delta.error or reason == "error" or reason == "abort":  # noqa: PLR1714  (narrows the type)
            raise UpstreamError(f"the engine gave up: {delta.error or reason}")
        choice = delta.index
        text = self._texts.get(choice)
        if text is not None and text.in_reasoning:
            before = self._num_output_tokens.get(choice, 0)
            self._num_reasoning_tokens += delta.num_output_tokens - before
        self._num_output_tokens[choice] = delta.num_output_tokens
        num_accepted = delta.num_accepted_tokens
        self._guesses[choice] = num_accepted, delta.num_draft_tokens - num_accepted
        if choice % self._n == 0:  # the prompt is counted once, so is what the cache saved of it
            self._num_cached_tokens[choice] = delta.num_cached_tokens
        if delta.text or delta.logprobs:
            self.has_content = True
            if text is not None and delta.text:
                events += text.feed(delta.text)
            if text is None or delta.logprobs:
                events.append(self._text_delta(delta, "" if text is not None else delta.text))
        if reason is not None:
            self.has_content = True
            self._num_open -= 1
            stop = delta.stop_reason if isinstance(delta.stop_reason, str) else None
            if text is not None:
                events += text.finish()
                reason = text.finish_reason(reason)
            events.append(Finished(reason, choice, stop))

    def _text_delta(self, delta: Delta, text: str) -> TextDelta:
        offsets = tuple(entry.text_offset for entry in delta.logprobs)
        logprobs = tuple(map(_token_logprob, delta.logprobs))
        return TextDelta(text, delta.index, logprobs, offsets if self._completions else ())

    def _new_texts(self) -> dict[int, AnswerText]:
        request, ready = self._request, self._ready
        names = frozenset(tool.name for tool in usable_tools(request))
        reasons = ready.reasons and request.extra.get("separate_reasoning") is not False
        if self._completions or not (names or reasons):
            return {}
        max_calls = 1 if request.parallel_tool_calls is False else None
        return {
            choice: AnswerText(
                choice,
                ReasoningSplitter(inside=self._in_reasoning) if reasons else None,
                CallParser(ready.tool_notation, names, choice, max_calls=max_calls)
                if names
                else None,
            )
            for choice in range(self._n)
        }

    def _usage(self) -> Usage:
        return Usage(
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=sum(self._num_output_tokens.values()),
            cached_tokens=sum(self._num_cached_tokens.values()),
            accepted_prediction_tokens=sum(right for right, _ in self._guesses.values()),
            rejected_prediction_tokens=sum(wrong for _, wrong in self._guesses.values()),
            reasoning_tokens=self._num_reasoning_tokens,
        )


def refusal(rejected: Rejected) -> GatewayError:
    """The error that a client deserves for what the worker refused."""
    if rejected.status >= 500:
        return UpstreamError(rejected.message, status=rejected.status)
    if rejected.code == "context_length_exceeded":
        return ContextLengthExceeded(rejected.message, param=rejected.param)
    kind = Unsupported if rejected.code == "unsupported_parameter" else InvalidRequest
    return kind(rejected.message, param=rejected.param, code=rejected.code)


def fingerprint(ready: Ready) -> str:
    """`system_fingerprint`: the same while weights and number formats are the same."""
    return "fp_" + hashlib.sha256(ready.fingerprint.encode()).hexdigest()[:12]


def _token_logprob(entry: Logprob) -> TokenLogprob:
    top = [TokenLogprob(e.token, e.logprob, list(e.data)) for e in entry.top]
    return TokenLogprob(entry.token, entry.logprob, list(entry.data), top)
