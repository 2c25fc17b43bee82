"""Where templates run: jinja2's immutable sandbox with transformers' extensions, and with budgets.

Loop turns, macro calls and the characters that come out are counted, for a template comes with a model file and a
request chooses its data.
"""

from __future__ import annotations

import json
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_TURNS = 1_000_000  # loop turns and macro calls of one rendering
MAX_CHARS = 1 << 24  # of one rendering, and of any text made by repetition
_TICK = "_tidegate_tick"


class TemplateError(Exception):
    """The template refuses these messages (by its own raise_exception) or is broken."""


class TemplateSource:
    """A template compiled for the sandbox.

    `wants_parts`: message content must come as a list of parts, for the template walks it and never asks whether it is
    a string.
    """

    def __init__(self, text: str) -> None:
        try:
            tree = _ENVIRONMENT.parse(text)
            self.wants_parts = _wants_parts(tree)
            self._template = _ENVIRONMENT.from_string(_counted(tree))
        except (jinja2.TemplateError, RecursionError) as exc:
            raise TemplateError(f"chat template: {exc}") from exc

    def render(self, scope: dict[str, Any]) -> str:
        """Raises TypeError as it comes, for the caller may have another form of the data; all else as TemplateError."""
        budget = _Budget()
        try:
            return "".join(
                map(budget.spend, self._template.generate({**scope, _TICK: budget.tick}))
            )
        except TemplateError:
            raise
        except jinja2.TemplateError as exc:
            raise TemplateError(f"chat template: {exc.message}") from exc
        except RecursionError:
            raise TemplateError("chat template: it calls itself without end") from None
        except (ArithmeticError, AttributeError, LookupError, MemoryError, ValueError) as exc:
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
