"""Chat messages to prompt text by the model's own Jinja template, the way transformers renders it.

Templates come from model files, so they run in jinja2's immutable sandbox and under budgets: loop turns and macro calls
are counted, and so are the characters that come out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

Message = dict[str, Any]

MAX_TURNS = 1_000_000  # loop turns and macro calls of one rendering
MAX_CHARS = 1 << 24  # of one rendering, and of any text made by repetition
_TICK = "_tidegate_tick"
_END = "\u241fend-of-final-message\u241f "  # ends in a space: where a template trims the text, that space is gone


class TemplateError(Exception):
    """The template refuses these messages (by its own raise_exception) or is broken."""


class ChatTemplate:
    """A parsed template.

    Args:
        text: Jinja source.
        tool_text: another source that takes over when a request has tools; some models bring two.
        bos_token, eos_token: their texts, for templates that print them; "" where the model has none.
        now: the clock behind `strftime_now`.

    Raises:
        TemplateError: the source is no valid Jinja.
    """

    def __init__(
        self,
        text: str,
        *,
        bos_token: str,
        eos_token: str,
        tool_text: str | None = None,
        now: Callable[[], datetime] = lambda: datetime.now().astimezone(),
    ) -> None:
        self.text = text
        self._globals = {
            "bos_token": bos_token,
            "eos_token": eos_token,
            "raise_exception": _raise_exception,
            "strftime_now": lambda pattern: now().strftime(pattern),
        }
        self._plain = _Source(text)
        self._with_tools = _Source(tool_text) if tool_text else self._plain

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """The prompt text, to be tokenized without adding special tokens.

        Args:
            messages, tools: as in an OpenAI request; neither is changed. No tools is None to the template.
            add_generation_prompt: end with the header of the assistant's turn.
            continue_final_message: end right after the last message's text, for the model to go on with it.
            kwargs: further template variables, such as `enable_thinking`.

        Raises:
            TemplateError: the message is the template's own where it has one.
        """
        if continue_final_message:
            messages = _marked(messages)
        variables = {
            **kwargs,
            "tools": list(tools) if tools else None,
            "documents": kwargs.get("documents"),
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
        }
        source = self._with_tools if tools else self._plain
        text = self._render_either(source, messages, variables)
        return _cut_at_mark(text) if continue_final_message else text

    def _render_either(
        self, source: _Source, messages: Sequence[Message], variables: dict[str, Any]
    ) -> str:
        """Most templates want tool arguments as objects and no tools as None; a few fail on the one or the other."""
        try:
            return self._render(
                source, _normalized(messages, source.wants_parts, parse=True), variables
            )
        except TypeError:
            variables = {**variables, "tools": variables["tools"] or []}
        try:
            return self._render(
                source, _normalized(messages, source.wants_parts, parse=False), variables
            )
        except TypeError as exc:
            raise TemplateError(f"chat template: {exc}") from exc

    def _render(self, source: _Source, messages: list[Message], variables: dict[str, Any]) -> str:
        budget = _Budget()
        scope = {**self._globals, **variables, "messages": messages, _TICK: budget.tick}
        try:
            return "".join(map(budget.spend, source.template.generate(scope)))
        except TemplateError:
            raise
        except jinja2.TemplateError as exc:
            raise TemplateError(f"chat template: {exc.message}") from exc
        except RecursionError:
            raise TemplateError("chat template: it calls itself without end") from None
        except (ArithmeticError, AttributeError, LookupError, MemoryError, ValueError) as exc:
            raise TemplateError(f"chat template: {exc}") from exc


class _Source:
    def __init__(self, text: str) -> None:
        try:
            tree = _ENVIRONMENT.parse(text)
            self.wants_parts = _wants_parts(tree)
            self.template = _ENVIRONMENT.from_string(_counted(tree))
        except (jinja2.TemplateError, RecursionError) as exc:
            raise TemplateError(f"chat template: {exc}") from exc


class _Budget:
    def __init__(self) -> None:
        self._turns, self._chars = MAX_TURNS, MAX_CHARS

    def tick(self) -> str:
        self._turns -= 1
        if self._turns < 0:
            raise TemplateError(f"chat template: more than {MAX_TURNS} loop turns")
        return ""

    def spend(self, text: str) -> str:
        self._chars -= len(text)
        if self._chars < 0:
            raise TemplateError(f"chat template: it prints more than {MAX_CHARS} characters")
        return text


def _raise_exception(message: object) -> None:
    raise TemplateError(str(message))


class _Environment(ImmutableSandboxedEnvironment):
    """Repetition is the cheap way to a huge text or number, so its result is sized beforehand."""

    intercepted_binops = frozenset(("*", "**"))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        sizes = [
            len(side) if isinstance(side, (str, list, tuple)) else side for side in (left, right)
        ]
        if operator == "**" or any(
            isinstance(n, (int, float)) and abs(n) > MAX_CHARS for n in sizes
        ):
            raise TemplateError("chat template: its arithmetic is out of bounds")
        if sizes != [left, right] and sizes[0] * sizes[1] > MAX_CHARS:
            raise TemplateError(
                f"chat template: it makes a text of more than {MAX_CHARS} characters"
            )
        return super().call_binop(context, operator, left, right)


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks assistant text for training; here it is its body."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """As transformers has it: plain JSON, neither HTML nor other letters escaped."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    return environment


_ENVIRONMENT = _environment()


def _counted(tree: nodes.Template) -> nodes.Template:
    """Every loop turn and macro call begins by taking one off the budget."""
    for node in tree.find_all((nodes.For, nodes.Macro)):
        tick = nodes.Call(nodes.Name(_TICK, "load"), [], [], None, None)
        node.body.insert(0, nodes.ExprStmt(tick))  # pyright: ignore[reportAttributeAccessIssue]
    tree.set_lineno(1)  # of the inserted nodes; it keeps those that are set
    return tree


def _wants_parts(tree: nodes.Template) -> bool:
    """Whether message content must come as a list of parts: the template walks it and never asks if it is a string."""
    walks = any(_is_content(loop.iter) for loop in tree.find_all(nodes.For))
    asks = any(
        test.name in ("string", "iterable", "sequence") for test in tree.find_all(nodes.Test)
    )
    return walks and not asks


def _is_content(node: nodes.Node) -> bool:
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
        return node.arg.value == "content"
    return isinstance(node, nodes.Name) and node.name == "content"


def _normalized(messages: Sequence[Message], wants_parts: bool, *, parse: bool) -> list[Message]:
    return [_normal_message(message, wants_parts, parse) for message in messages]


def _normal_message(message: Message, wants_parts: bool, parse: bool) -> Message:
    content = _joined(message.get("content"))
    if wants_parts and isinstance(content, str):
        content = [{"type": "text", "text": content}]
    normal = {**message, "content": content}
    if parse and message.get("tool_calls"):
        normal["tool_calls"] = [_with_arguments_parsed(call) for call in message["tool_calls"]]
    return normal


def _joined(content: Any) -> Any:
    """None is ""; text parts become one text; parts of another kind are left for the template."""
    if content is None:
        return ""
    if isinstance(content, list):
        texts = [text for text in map(_part_text, content) if text is not None]
        if len(texts) == len(content):
            return "\n".join(texts)
    return content


def _part_text(part: Any) -> str | None:
    """None: a part of another kind."""
    text = part.get("text") if isinstance(part, dict) else part
    return text if isinstance(text, str) else None


def _with_arguments_parsed(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _marked(messages: Sequence[Message]) -> list[Message]:
    if not messages:
        raise TemplateError("there is no final message to continue")
    *earlier, last = messages
    content = _joined(last.get("content"))
    if not isinstance(content, str):
        raise TemplateError("only a final message of text can be continued")
    return [*earlier, {**last, "content": content + _END}]


def _cut_at_mark(text: str) -> str:
    at = text.rfind(_END.strip())
    if at < 0:
        raise TemplateError(
            "the chat template does not print the final message, so it cannot be continued"
        )
    return text[:at] if text.startswith(_END, at) else text[:at].rstrip()
