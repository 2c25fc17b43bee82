"""Read OpenAI-shaped answers of any dialect into events: odd fields understood, missing ones made, once and for all.

Non-OpenAI servers send arguments as objects, calls without id or index, finish reasons of their own, nulls anywhere.
A whole answer (`message`) and a chunk (`delta`) are read by the same code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from plugins.errors import UpstreamUnavailable
from plugins.events import (
    Event,
    Finished,
    FinishReason,
    Json,
    ReasoningDelta,
    RefusalDelta,
    Started,
    TextDelta,
)
from plugins.providers.lenient_json import a_text, an_object, joined_text, objects
from plugins.providers.openai_calls import close_calls, new_id, read_call
from plugins.providers.openai_logprobs import read_logprobs
from plugins.providers.openai_state import AnswerState, ChoiceState
from plugins.providers.openai_usage import read_usage
from plugins.providers.openai_wire import FINISH_REASONS

_OTHER_REASONS: dict[str, FinishReason] = {
    "max_tokens": "length",
    "max_length": "length",
    "max_output_tokens": "length",
    "model_length": "length",
    "model_context_window_exceeded": "length",
    "tool_use": "tool_calls",
    "tool_call": "tool_calls",
    "function_calls": "tool_calls",
    "safety": "content_filter",
    "recitation": "content_filter",
    "prohibited_content": "content_filter",
    "sensitive": "content_filter",
    "refusal": "content_filter",
    "blocked": "content_filter",
}
_FAILED_REASONS = frozenset(
    {
        "error",
        "abort",
        "aborted",
        "cancelled",
        "engine_error",
        "network_error",
        "insufficient_system_resource",
    }
)


class AnswerReader:
    """Turns the JSON objects of one answer into events; what they have in common is kept in `state`.

    `model`, `id_prefix` and `wall_clock` fill in for what the upstream leaves out.
    """

    def __init__(
        self,
        provider: str,
        model: str,
        id_prefix: str,
        state: AnswerState,
        wall_clock: Callable[[], float],
    ) -> None:
        self._provider = provider
        self._model = model
        self._id_prefix = id_prefix
        self._state = state
        self._wall_clock = wall_clock

    def read(self, document: Json) -> list[Event]:
        """Events of one chunk or one whole answer; none for an object without choices."""
        usage = read_usage(document.get("usage"))
        if usage is not None:
            self._state.usage = usage
        events: list[Event] = []
        for position, choice in enumerate(objects(document.get("choices"))):
            if self._state.started is None:
                self._state.started = self._start(document)
                events.append(self._state.started)
            index = choice.get("index")
            is_count = isinstance(index, int) and not isinstance(index, bool) and index >= 0
            self._read_choice(choice, cast(int, index) if is_count else position, events)
        return events

    def end(self) -> list[Event]:
        """What ends an answer that is complete: the finish of choices that gave none, then usage."""
        events: list[Event] = []
        for index, state in self._state.choices.items():
            if not state.finished:
                self._finish("tool_calls" if state.calls else "stop", index, state, events)
        if self._state.usage is not None:
            events.append(self._state.usage)
        return events

    def _start(self, document: Json) -> Started:
        created = document.get("created")
        is_time = isinstance(created, int | float) and created > 0
        return Started(
            id=a_text(document.get("id")) or new_id(self._id_prefix),
            model=a_text(document.get("model")) or self._model,
            created_s=int(cast(float, created) if is_time else self._wall_clock()),
            fingerprint=a_text(document.get("system_fingerprint")) or None,
            service_tier=a_text(document.get("service_tier")) or None,
        )

    def _read_choice(self, choice: Json, index: int, events: list[Event]) -> None:
        state = self._state.choice(index)
        body = an_object(choice.get("delta")) or an_object(choice.get("message"))
        self._read_reasoning(body, index, events)
        texts = joined_text(body.get("content")) + a_text(choice.get("text"))
        self._read_text(texts, choice.get("logprobs"), index, state, events)
        if refusal := a_text(body.get("refusal")):
            events.append(RefusalDelta(refusal, index))
        for call in objects(body.get("tool_calls")):
            read_call(call, index, state, events)
        if legacy := an_object(body.get("function_call")):
            read_call({"index": 0, "function": legacy}, index, state, events)
        reason = choice.get("finish_reason")
        if isinstance(reason, str) and reason and not state.finished:
            self._finish(self._finish_reason(reason, state), index, state, events)

    def _read_reasoning(self, body: Json, index: int, events: list[Event]) -> None:
        """Two names for one text; servers that send both send the same twice. Mistral sends parts in `content`."""
        text = a_text(body.get("reasoning_content")) or a_text(body.get("reasoning"))
        for part in objects(body.get("content")):
            if part.get("type") == "thinking":
                text += a_text(part.get("thinking")) or joined_text(part.get("thinking"))
        if text:
            events.append(ReasoningDelta(text, index))

    def _read_text(
        self, text: str, logprobs: Any, index: int, state: ChoiceState, events: list[Event]
    ) -> None:
        if state.high_surrogate or not text.isascii():
            text = _whole_characters(text, state)
        tokens, offsets = read_logprobs(logprobs)
        if text or tokens:
            events.append(TextDelta(text, index, tokens, offsets))

    def _finish(
        self, reason: FinishReason, index: int, state: ChoiceState, events: list[Event]
    ) -> None:
        if state.high_surrogate:
            events.append(TextDelta("\ufffd", index))
            state.high_surrogate = ""
        close_calls(index, state, events)
        self._state.finish(state)
        events.append(Finished(reason, index))

    def _finish_reason(self, reason: str, state: ChoiceState) -> FinishReason:
        known = FINISH_REASONS.get(reason)
        if known is not None:
            return known
        reason = reason.lower()
        if reason in _FAILED_REASONS:
            raise UpstreamUnavailable(
                f"provider {self._provider}: gave up in the middle of the answer"
            )
        ended = _OTHER_REASONS.get(reason, "stop")  # eos_token, end_turn, stop_sequence, STOP ...
        return "tool_calls" if ended == "stop" and state.calls else ended


def _whole_characters(text: str, state: ChoiceState) -> str:
    """Joins characters that were cut into surrogates; a half that stays alone becomes U+FFFD."""
    text = state.high_surrogate + text
    state.high_surrogate = ""
    if text and "\ud800" <= text[-1] <= "\udbff":
        state.high_surrogate = text[-1]
        text = text[:-1]
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
