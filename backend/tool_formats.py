"""How one model is shown tools and made to call them: what its chat template does, and what is done in its place.

The notations are those of tool_parser.py. A model whose template knows no tools is told about them in words, and
answers in the hermes notation.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from backend.engine.grammar_spec import WHITESPACE, GrammarSpec
from backend.tool_parser import CLOSINGS, OPENINGS

MAX_CALLS = 16  # of one answer that must call: a small model would go on for ever
_INSTRUCTION = """You can call functions. To call one, write its name and its arguments as JSON between two tags:
<tool_call>
{"name": "function name", "arguments": {"argument": "value"}}
</tool_call>
You are then told the result. Call a function only where it helps to answer. The functions are:
"""
Message = dict[str, Any]
Tools = list[dict[str, Any]]
Form = tuple[list[Message], Tools | None]


class MarkerTokenizer(Protocol):
    def encode(
        self, text: str, *, add_special: bool = False, parse_special: bool = True
    ) -> list[int]: ...

    def token_bytes(self, token_id: int) -> bytes: ...


@dataclass(frozen=True)
class ToolFormat:
    """`markers`: special tokens that a call is told by, so they must show in the text."""

    notation: str
    in_template: bool
    markers: dict[int, bytes] = field(default_factory=dict[int, bytes])

    def forms(self, messages: list[Message], tools: Tools | None) -> list[Form]:
        """Messages and tools for the template; where it refuses the first form, the second one is for it."""
        if self.notation == "mistral":
            return [([_with_short_ids(message) for message in messages], tools)]
        if self.in_template:
            return [(messages, tools)]
        plain = _in_words(messages)
        if not tools:
            return [(plain, None)]
        lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
        text = _INSTRUCTION + lines
        return [(_told_by_system(plain, text), None), (_told_by_user(plain, text), None)]

    def grammar(self, tools: Tools, names: Sequence[str], *, parallel: bool) -> GrammarSpec:
        """Answers that are calls of the tools named, and nothing else."""
        chosen = [tool["function"] for tool in tools if tool["function"]["name"] in names]
        key = "parameters" if self.notation in ("llama", "pythonic") else "arguments"
        lines = [self._start(parallel), "body: " + " | ".join(f"f{i}" for i in range(len(chosen)))]
        for i, function in enumerate(chosen):
            head = json.dumps(f'{{"name": {json.dumps(function["name"])}, "{key}": ')
            lines.append(f'f{i}: {head} a{i} "}}"')
            lines.append(f"a{i}: %json {_parameters(function)}")
        return GrammarSpec("lark", "\n".join(lines), "tools")

    def _start(self, parallel: bool) -> str:
        many = f"{{0,{MAX_CALLS - 1}}}"
        if self.notation == "hermes":
            opening, closing = self._literal("<tool_call>"), self._literal("</tool_call>")
            call = f'call: {opening} "\\n" body "\\n" {closing}'
            more = f'("\\n" call){many}' if parallel else ""
            return f"start: call {more}\n{call}"
        if self.notation == "mistral":
            more = f'(", " body){many}' if parallel else ""
            return f'start: {self._literal("[TOOL_CALLS]")} "[" body {more} "]"'
        return "start: body"

    def _literal(self, text: str) -> str:
        for token_id, spelled in self.markers.items():
            if spelled == text.encode():
                return f"<[{token_id}]>"
        return json.dumps(text)


def tool_format(template_text: str, tokenizer: MarkerTokenizer) -> ToolFormat:
    """The format of the model that this template belongs to; a family we do not know is read as hermes."""
    in_template = bool(re.search(r"\btools\b", template_text))
    notation = _notation(template_text)
    texts = (OPENINGS[notation], CLOSINGS.get(notation, ""))
    return ToolFormat(notation, in_template, special_tokens(texts, tokenizer))


def special_tokens(texts: Sequence[str], tokenizer: MarkerTokenizer) -> dict[int, bytes]:
    """Those of the texts that are a special token of this model, by its id."""
    found = {text: tokenizer.encode(text) for text in texts if text}
    return {
        ids[0]: text.encode()
        for text, ids in found.items()
        if len(ids) == 1 and not tokenizer.token_bytes(ids[0])
    }


def _notation(template_text: str) -> str:
    if "[TOOL_CALLS]" in template_text:
        return "mistral"
    if "<tool_call>" in template_text:
        return "hermes"
    if re.search(r"\[func_name1\(", template_text):
        return "pythonic"
    if "<|python_tag|>" in template_text or "ipython" in template_text:
        return "llama"
    return "hermes"


def _parameters(function: dict[str, Any]) -> str:
    """The arguments' schema. Unknown arguments are of no use to anybody unless the tool asks for them."""
    schema = {"additionalProperties": False, **(function.get("parameters") or {})}
    schema.setdefault("type", "object")
    return json.dumps(schema | {"x-guidance": {"whitespace_pattern": WHITESPACE, "lenient": True}})


# -- In place of a template that knows no tools ----------------------------------------------------------------------


def _in_words(messages: list[Message]) -> list[Message]:
    """Calls as the text they were, results as a user's message."""
    out: list[Message] = []
    for message in messages:
        if message["role"] == "tool":
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            if out and out[-1].get("results"):
                out[-1] = {**out[-1], "content": f"{out[-1]['content']}\n{text}"}
            else:
                out.append({"role": "user", "content": text, "results": True})
        elif calls := message.get("tool_calls"):
            texts = [message["content"], *(_call_text(call["function"]) for call in calls)]
            content = "\n".join(text for text in texts if text)
            out.append({"role": message["role"], "content": content})
        else:
            out.append(message)
    return out


def _call_text(function: dict[str, Any]) -> str:
    body = f'{{"name": {json.dumps(function["name"])}, "arguments": {function["arguments"]}}}'
    return f"<tool_call>\n{body}\n</tool_call>"


def _told_by_system(messages: list[Message], text: str) -> list[Message]:
    first = messages[0]
    if first["role"] in ("system", "developer"):
        return [{**first, "content": f"{first['content']}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _told_by_user(messages: list[Message], text: str) -> list[Message]:
    """For templates without a system role."""
    first = messages[0]
    return [{**first, "content": f"{text}\n\n{first['content']}"}, *messages[1:]]


def _with_short_ids(message: Message) -> Message:
    """Mistral's templates refuse call ids that are not nine letters or digits."""
    short = dict(message)
    if "tool_call_id" in message:
        short["tool_call_id"] = _short_id(message["tool_call_id"])
    if message.get("tool_calls"):
        short["tool_calls"] = [{**c, "id": _short_id(c["id"])} for c in message["tool_calls"]]
    return short


def _short_id(call_id: str) -> str:
    if re.fullmatch(r"[a-zA-Z0-9]{9}", call_id):
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:9]
