"""From the worker's messages about one request to the gateway's events."""

from __future__ import annotations

import hashlib
import secrets
import time

from backend.protocol import Accepted, Delta, Logprob, Ready, Rejected
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
        self._num_output_tokens[choice] = delta.num_output_tokens
        num_accepted = delta.num_accepted_tokens
        self._guesses[choice] = num_accepted, delta.num_draft_tokens - num_accepted
        if choice % self._n == 0:  # the prompt is counted once, so is what the cache saved of it
            self._num_cached_tokens[choice] = delta.num_cached_tokens
        if delta.text or delta.logprobs:
            self.has_content = True
            offsets = tuple(entry.text_offset for entry in delta.logprobs)
            logprobs = tuple(map(_token_logprob, delta.logprobs))
            events.append(
                TextDelta(delta.text, choice, logprobs, offsets if self._completions else ())
            )
        if reason is not None:
            self.has_content = True
            self._num_open -= 1
            stop = delta.stop_reason if isinstance(delta.stop_reason, str) else None
            events.append(Finished(reason, choice, stop))

    def _usage(self) -> Usage:
        return Usage(
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=sum(self._num_output_tokens.values()),
            cached_tokens=sum(self._num_cached_tokens.values()),
            accepted_prediction_tokens=sum(right for right, _ in self._guesses.values()),
            rejected_prediction_tokens=sum(wrong for _, wrong in self._guesses.values()),
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
