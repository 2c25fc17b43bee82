"""Tool calls as servers send them: whole or in pieces, with or without index and id, arguments as text or object."""

from __future__ import annotations

import string
from random import SystemRandom

from plugins.events import Event, Json, ToolCallDelta
from plugins.providers.lenient_json import a_text, an_object, json_text
from plugins.providers.openai_state import CallState, ChoiceState

_ALPHANUMERICS = string.ascii_letters + string.digits
_random = SystemRandom()


def new_id(prefix: str) -> str:
    """`prefix` and 24 alphanumerics, as OpenAI's ids are."""
    return prefix + "".join(_random.choices(_ALPHANUMERICS, k=24))


def read_call(call: Json, choice: int, state: ChoiceState, events: list[Event]) -> None:
    function = an_object(call.get("function")) or an_object(call.get("custom")) or call
    known = _find_call(call, a_text(function.get("name")), state)
    if known is None:
        known = CallState(len(state.calls), a_text(call.get("id")), a_text(function.get("name")))
        state.calls.append(known)
    known.id = known.id or a_text(call.get("id"))
    known.name = known.name or a_text(function.get("name"))
    upstream_index = call.get("index")
    if isinstance(upstream_index, int):
        state.calls_by_upstream_index[upstream_index] = known
    google = an_object(an_object(call.get("extra_content")).get("google"))
    known.signature = a_text(google.get("thought_signature")) or known.signature
    arguments = json_text(function.get("arguments", function.get("input")))
    known.has_arguments = known.has_arguments or bool(arguments)
    if known.announced:
        if arguments:
            events.append(ToolCallDelta(known.index, choice, arguments=arguments))
    else:
        known.held_arguments += arguments
        if known.name:
            _announce(known, choice, events)


def close_calls(choice: int, state: ChoiceState, events: list[Event]) -> None:
    """At the end of a choice: show calls without a name too, and give those without arguments their empty object."""
    for call in state.calls:
        if not call.announced:
            _announce(call, choice, events)
        if not call.has_arguments:
            events.append(ToolCallDelta(call.index, choice, arguments="{}"))


def _find_call(call: Json, name: str, state: ChoiceState) -> CallState | None:
    """The call that this piece belongs to; None: a new one. An index may be missing, or 0 for every call."""
    call_id = a_text(call.get("id"))
    index = call.get("index")
    if isinstance(index, int):
        known = state.calls_by_upstream_index.get(index)
        if known is not None and name and call_id and known.id and call_id != known.id:
            return None
        return known
    if not state.calls:
        return None
    last = state.calls[-1]
    if call_id:
        return next((known for known in state.calls if known.id == call_id), None)
    return None if name and last.name else last


def _announce(call: CallState, choice: int, events: list[Event]) -> None:
    call.announced = True
    call.id = call.id or new_id("call_")
    arguments, signature = call.held_arguments, call.signature or None
    events.append(ToolCallDelta(call.index, choice, call.id, call.name, arguments, signature))
