"""Tool calls out of generated text, piece by piece, in the notations of the model families.

hermes      <tool_call>{"name": "f", "arguments": {...}}</tool_call>, as often as there are calls (Hermes, Qwen)
mistral     [TOOL_CALLS][{"name": "f", "arguments": {...}}, ...]
llama       the whole answer is {"name": "f", "parameters": {...}}, perhaps behind <|python_tag|> (Llama 3)
pythonic    the whole answer is [f(a=1), g()] (Llama 3.2 and later)

What looks like a call and is none comes out as text. The events do not depend on how the text was cut.
"""

from __future__ import annotations

import ast
import json
import re
import secrets
import string
from collections.abc import Callable
from typing import Any, cast

from backend.json_span import JsonSpan
from plugins.events import Event, TextDelta, ToolCallDelta

OPENINGS = {
    "hermes": "<tool_call>",
    "mistral": "[TOOL_CALLS]",
    "llama": "<|python_tag|>",
    "pythonic": "<|python_tag|>",
}
CLOSINGS = {"hermes": "</tool_call>"}
_BETWEEN = " \t\r\n,;[]"
_ALPHABET = string.ascii_letters + string.digits
# The order in which every family writes a call, so that its arguments can leave before it is complete.
_HEADER = re.compile(
    r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)


def new_call_id() -> str:
    return "call_" + "".join(secrets.choice(_ALPHABET) for _ in range(24))


class CallParser:
    """Of one choice. `names`: the tools there are; a bare JSON object that names none of them is an answer."""

    def __init__(
        self,
        notation: str,
        names: frozenset[str],
        choice: int = 0,
        *,
        max_calls: int | None = None,
        new_id: Callable[[], str] = new_call_id,
    ) -> None:
        self.num_calls = 0
        self._opening = OPENINGS[notation]
        self._closing = CLOSINGS.get(notation, "")
        self._names = names
        self._choice = choice
        self._max_calls = max_calls
        self._new_id = new_id
        self._rest = ""
        self._call: _Call | None = None
        self._read = self._read_text if notation in ("hermes", "mistral") else self._read_start
        self._opened = ""  # the marker behind which no call has come yet
        self._bare = False  # whether calls are told by nothing but their form
        self._events: list[Event] = []

    def feed(self, text: str) -> list[Event]:
        self._rest += text
        while self._rest and self._read():
            pass
        events, self._events = self._events, []
        return events

    def finish(self) -> list[Event]:
        """The end of the text: what was held back, as what it is by now."""
        if self._read == self._read_list:
            self._end_list()
        if self._call is not None and not self._call.is_sent:
            self._rest = self._opened + self._call.text
        elif self._read in (self._read_call, self._read_between):
            self._rest = self._opened
        self._say(self._rest)
        self._rest, self._call = "", None
        events, self._events = self._events, []
        return events

    # -- Readers take something off `_rest`; False: they need more of it ----------------------------

    def _read_start(self) -> bool:
        """The beginning of an answer that may be nothing but calls."""
        text = self._rest.lstrip()
        if text.startswith(self._opening):
            self._rest, self._opened = text[len(self._opening) :], self._opening
            self._read = self._read_between
            return True
        inner = text[1:].lstrip() if text[:1] == "[" else text
        if not inner or self._opening.startswith(text):
            return False
        if inner[0] == "{":
            self._rest, self._bare, self._read = text, True, self._read_between
        else:
            self._read = self._read_list if text[0] == "[" else self._read_text
        return True

    def _read_text(self) -> bool:
        before, found, after = self._rest.partition(self._opening)
        if found:
            self._say(before.rstrip())
            self._rest, self._opened, self._read = after, found, self._read_between
            return True
        held = self._rest[_held_from(self._rest, self._opening) :]
        self._say(self._rest[: len(self._rest) - len(held)])
        self._rest = held
        return False

    def _read_between(self) -> bool:
        """Behind a marker, or between two calls."""
        rest = self._rest.lstrip(_BETWEEN)
        if not rest:
            return False
        if rest[0] == "{":
            self._rest, self._call, self._read = rest, _Call(), self._read_call
        elif self._closing and rest.startswith(self._closing):
            self._rest, self._opened = rest[len(self._closing) :], ""
            self._read = self._read_text
        elif self._closing and self._closing.startswith(rest):
            return False
        else:
            self._rest, self._opened = self._opened + self._rest, ""
            self._read = self._read_rest
        return True

    def _read_call(self) -> bool:
        call = self._call
        assert call is not None
        self._rest = call.feed(self._rest)
        if call.is_known and not call.is_sent and not self._is_answer(call.name):
            call.is_sent, self._opened = True, ""
            call.index = self.num_calls
            self.num_calls += 1
            self._emit(call.index, call_id=self._new_id(), name=call.name)
        if call.is_sent and (arguments := call.take_arguments()):
            self._emit(call.index, arguments=arguments)
        if not call.is_complete:
            return False
        self._call, self._read = None, self._read_between
        if not call.is_sent:
            self._rest, self._opened = self._opened + call.text + self._rest, ""
            self._read = self._read_rest
        return True

    def _read_list(self) -> bool:
        return False  # a Python list is parsed whole

    def _read_rest(self) -> bool:
        """Text that was taken for a call begins with a marker that must not be found again."""
        self._say(self._rest[0])
        self._rest = self._rest[1:]
        self._read = self._read_text
        return True

    def _is_answer(self, name: str) -> bool:
        return self._bare and name not in self._names

    def _end_list(self) -> None:
        calls = _python_calls(self._rest, self._names)
        for name, arguments in calls:
            self._emit(self.num_calls, call_id=self._new_id(), name=name, arguments=arguments)
            self.num_calls += 1
        if calls:
            self._rest = ""
        self._read = self._read_text

    def _say(self, text: str) -> None:
        if text and (text.strip() or not self.num_calls):
            self._events.append(TextDelta(text, self._choice))

    def _emit(
        self,
        index: int,
        *,
        call_id: str | None = None,
        name: str | None = None,
        arguments: str = "",
    ) -> None:
        if self._max_calls is None or index < self._max_calls:
            self._events.append(ToolCallDelta(index, self._choice, call_id, name, arguments))


class _Call:
    """One JSON object that should be a call, as far as it has come."""

    def __init__(self) -> None:
        self.text = ""
        self.name = ""
        self.index = 0
        self.is_known = False  # by name
        self.is_sent = False
        self.is_complete = False
        self._span, self._argument_span = JsonSpan(), JsonSpan()
        self._arguments_at = -1
        self._arguments = ""  # not taken yet

    def feed(self, text: str) -> str:
        """Take what belongs to the object -> what lies behind it."""
        end = self._span.find_end(text)
        known = len(self.text)
        self.text += text if end is None else text[:end]
        self.is_complete = end is not None
        if self._arguments_at < 0 and not self.is_known:
            self._read_header()
            known = self._arguments_at
        if self._arguments_at >= 0:
            self._grow(self.text[known:])
        elif self.is_complete:
            self._read_whole()
        return "" if end is None else text[end:]

    def take_arguments(self) -> str:
        arguments, self._arguments = self._arguments, ""
        return arguments

    def _read_header(self) -> None:
        header = _HEADER.match(self.text)
        if header is not None:
            self.name = json.loads(header[1], strict=False)
            self.is_known, self._arguments_at = True, header.end()

    def _grow(self, text: str) -> None:
        if not self._argument_span.is_complete:
            end = self._argument_span.find_end(text)
            self._arguments += text if end is None else text[:end]

    def _read_whole(self) -> None:
        try:
            value = json.loads(self.text, strict=False)
        except ValueError:
            return
        if isinstance(value.get("function"), dict):
            value = cast("dict[str, Any]", value["function"])
        name = value.get("name")
        arguments = value.get("arguments", value.get("parameters"))
        if isinstance(name, str) and isinstance(arguments, dict | str | None):
            self.name, self.is_known = name, True
            self._arguments = (
                arguments
                if isinstance(arguments, str)
                else json.dumps(arguments or {}, ensure_ascii=False)
            )


def _held_from(text: str, marker: str) -> int:
    """Where the end of `text` begins that may belong to a call: part of the marker, and the space before it."""
    at = len(text)
    for start in range(max(0, len(text) - len(marker) + 1), len(text)):
        if marker.startswith(text[start:]):
            at = start
            break
    return len(text[:at].rstrip())


def _python_calls(text: str, names: frozenset[str]) -> list[tuple[str, str]]:
    """(name, arguments as JSON) of a Python list of calls with literal arguments; [] where it is anything else."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        if not isinstance(tree, ast.List):
            return []
        return [_python_call(node, names) for node in tree.elts]
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return []


def _python_call(node: ast.expr, names: frozenset[str]) -> tuple[str, str]:
    if not isinstance(node, ast.Call) or node.args or ast.unparse(node.func) not in names:
        raise ValueError("not a call of a tool")
    arguments = {str(k.arg): ast.literal_eval(k.value) for k in node.keywords}
    return ast.unparse(node.func), json.dumps(arguments, ensure_ascii=False)
