"""A chat to prompt text: the model's own template, with what it lacks for tools put into words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from backend.engine.grammar_spec import GrammarSpec
from backend.protocol import Generate
from backend.reasoning import OPENING, opens_block
from backend.tool_formats import MarkerTokenizer, ToolFormat, special_tokens, tool_format


class ChatTemplate(Protocol):
    """What the worker needs of `backend.models.chat_template`."""

    text: str
    tool_text: str

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str: ...


@dataclass(frozen=True, slots=True)
class ChatReader:
    """`template_error` is what the template raises for messages it does not take."""

    template: ChatTemplate
    template_error: type[Exception]
    calls: ToolFormat
    reasons: bool  # the template knows reasoning blocks, and they are to be told apart
    reasoning_markers: dict[int, bytes]

    def render(self, request: Generate) -> str:
        """Raises `template_error`: the first one, where several ways to show the tools were tried."""
        messages = self._known_roles(request.messages or [])
        forms = self.calls.forms(messages, request.tools)
        for i, (shown, tools) in enumerate(forms):
            try:
                return self._render(request, shown, tools)
            except self.template_error:
                if i == len(forms) - 1:
                    raise
        raise AssertionError("there is always one form")

    def in_reasoning(self, prompt: str) -> bool:
        return self.reasons and opens_block(prompt)

    def markers(self, request: Generate) -> dict[int, bytes]:
        """Special tokens that must show in the answer's text for it to be read."""
        return self.reasoning_markers | (self.calls.markers if request.tools else {})

    def grammar(self, request: Generate) -> GrammarSpec | None:
        """A call that must be made goes before a form of the answer."""
        if request.must_call and request.tools:
            return self.calls.grammar(
                request.tools, request.must_call, parallel=request.parallel_calls
            )
        return request.grammar

    def _render(
        self,
        request: Generate,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
    ) -> str:
        return self.template.render(
            messages,
            tools,
            add_generation_prompt=not request.continue_final_message,
            continue_final_message=request.continue_final_message,
            **request.template_kwargs,
        )

    def _known_roles(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Templates older than the developer role know it as the system's."""
        if "developer" in self.template.text:
            return messages
        return [
            {**message, "role": "system"} if message["role"] == "developer" else message
            for message in messages
        ]


def chat_reader(
    template: ChatTemplate,
    template_error: type[Exception],
    tokenizer: MarkerTokenizer,
    *,
    reasoning: bool = True,
) -> ChatReader:
    """`reasoning=False`: blocks stay in the text."""
    reasons = reasoning and OPENING in template.text
    texts = ("<think>", "</think>") if reasons else ()
    return ChatReader(
        template,
        template_error,
        tool_format(template.tool_text, tokenizer),
        reasons,
        special_tokens(texts, tokenizer),
    )
