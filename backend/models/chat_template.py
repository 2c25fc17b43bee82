"""Chat messages to prompt text by the model's own Jinja template, the way transformers renders it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from backend.models.template_sandbox import TemplateError, TemplateSource

__all__ = ["ChatTemplate", "TemplateError"]

Message = dict[str, Any]

_END = "\u241fend-of-final-message\u241f "  # ends in a space: where a template trims the text, that space is gone


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
        self.tool_text = tool_text or text
        self._globals = {
            "bos_token": bos_token,
            "eos_token": eos_token,
            "raise_exception": _raise_exception,
            "strftime_now": lambda pattern: now().strftime(pattern),
        }
        self._plain = TemplateSource(text)
        self._with_tools = TemplateSource(tool_text) if tool_text else self._plain

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
        self, source: TemplateSource, messages: Sequence[Message], variables: dict[str, Any]
    ) -> str:
        """Most templates want tool arguments as objects and no tools as None; a few fail on the one or the other."""
        scope = {**variables, **self._globals}
        try:
            return source.render(
                {**scope, "messages": _normalized(messages, source.wants_parts, parse=True)}
            )
        except TypeError:
            scope["tools"] = scope["tools"] or []
        try:
            return source.render(
                {**scope, "messages": _normalized(messages, source.wants_parts, parse=False)}
            )
        except TypeError as exc:
            raise TemplateError(f"chat template: {exc}") from exc


def _raise_exception(message: object) -> None:
    raise TemplateError(str(message))


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
