"""From a `Generate` message to prompt token ids, inside the worker: render, tokenize, check the length."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import msgspec

from backend.chat_reader import ChatReader
from backend.engine.grammar_spec import GrammarSpec, InvalidGrammar
from backend.engine.params import GenerationRequest, InvalidGeneration, check_token_ids
from backend.protocol import Generate, Rejected
from backend.reasoning import CLOSING

if TYPE_CHECKING:
    from backend.engine.grammar import CompiledGrammar, GrammarCompiler, TokenGrammar

MAX_ROWS = 1024  # prompts x n of one request
INLINE_CHARS = 8_000  # some 6 ms of tokenizing; longer prompts are read beside the event loop


class Refused(Exception):
    """A request that is answered with `Rejected`."""

    def __init__(self, message: str, param: str, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code

    def reply(self, request_id: int) -> Rejected:
        return Rejected(request_id, self.message, self.param, self.code)


class Tokenizer(Protocol):
    """What the worker needs of `backend.models.tokenizer`."""

    vocab_size: int

    def encode(
        self, text: str, *, add_special: bool = False, parse_special: bool = True
    ) -> list[int]: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def token_text(self, token_id: int) -> str: ...


@dataclass(slots=True)
class Prompt:
    token_ids: list[int]
    text: str  # what `echo` gives back
    grammar: CompiledGrammar | None = None
    in_reasoning: bool = False
    markers: dict[int, bytes] = field(default_factory=dict[int, bytes])


@dataclass(slots=True)
class PromptReader:
    """Reads prompts for one model."""

    tokenizer: Tokenizer
    chat: ChatReader | None  # None: it has no template
    max_model_len: int
    vocab_size: int
    grammars: GrammarCompiler | None = None  # None: this model cannot be held to a form
    _max_chars: int = field(init=False)

    def __post_init__(self) -> None:
        longest = max(
            (len(self.tokenizer.token_text(i)) for i in range(self.tokenizer.vocab_size)), default=1
        )
        # Unicode normalization may shrink a text to a third; beyond this no prompt can fit.
        self._max_chars = 3 * max(1, longest) * self.max_model_len

    def is_long(self, request: Generate) -> bool:
        """Whether reading it would hold up the event loop."""
        grammar = self._grammar(request)
        if grammar and self.grammars and not self.grammars.has(grammar):
            return True
        if request.messages is not None:
            return _chat_chars(request) > INLINE_CHARS
        return sum(len(prompt) for prompt in request.prompts) > INLINE_CHARS

    def read(self, request: Generate) -> list[Prompt]:
        """Raises Refused, with the numbers where a prompt is too long."""
        if request.messages is not None:
            prompts = [self._chat(request)]
        else:
            if not request.prompts:
                raise Refused("prompt is empty: it needs at least one text", "prompt")
            prompts = self._completions(request)
        rows = request.rows_per_prompt
        if request.n < 1:
            raise Refused(f"n must be at least 1, got {request.n}", "n")
        if request.embedding is None and len(prompts) * rows > MAX_ROWS:
            message = f"{len(prompts)} prompts of {rows} choices; the limit is {MAX_ROWS} in all"
            raise Refused(message, "n" if rows == request.n else "best_of")
        if (spec := self._grammar(request)) is not None:
            grammar = self._compile(spec)
            for prompt in prompts:
                prompt.grammar = grammar
        return prompts

    def _grammar(self, request: Generate) -> GrammarSpec | None:
        return self.chat.grammar(request) if self.chat else request.grammar

    def _compile(self, spec: GrammarSpec) -> CompiledGrammar:
        if self.grammars is None:
            raise Refused(f"{spec.param}: this model cannot be held to a form", spec.param)
        try:
            return self.grammars.compile(spec)
        except InvalidGrammar as exc:
            raise Refused(f"Invalid {spec.param}: {exc}", spec.param) from exc

    def _chat(self, request: Generate) -> Prompt:
        if self.chat is None:
            message = "this model has no chat template: use /v1/completions, or set `template`"
            raise Refused(message, "messages")
        try:
            text = self.chat.render(request)
        except self.chat.template_error as exc:
            message = str(exc).removeprefix("chat template: ")
            raise Refused(f"the chat template refuses the messages: {message}", "messages") from exc
        # The template holds the model's own beginning-of-text token.
        token_ids = self._encode(text, "messages", add_special=False)
        return Prompt(
            token_ids,
            text,
            in_reasoning=self.chat.in_reasoning(text),
            markers=self.chat.markers(request),
        )

    def _completions(self, request: Generate) -> list[Prompt]:
        if request.embedding is None:
            min_output = int(request.params.max_tokens != 0)
            return [self._completion(prompt, "prompt", min_output) for prompt in request.prompts]
        one = len(request.prompts) == 1
        return [
            self._completion(text, "input" if one else f"input[{i}]", 0)
            for i, text in enumerate(request.prompts)
        ]

    def _completion(self, prompt: str | list[int], param: str, min_output: int) -> Prompt:
        if isinstance(prompt, str):
            token_ids = self._encode(prompt, param, add_special=True, min_output=min_output)
            return Prompt(token_ids, prompt)
        try:
            check_token_ids(prompt, param, self.vocab_size)
        except InvalidGeneration as exc:
            raise Refused(exc.message, param) from exc
        self._check_length(len(prompt), param, min_output)
        text = b"".join(map(self.tokenizer.token_bytes, prompt)).decode(errors="replace")
        return Prompt(prompt, text)

    def _encode(
        self, text: str, param: str, *, add_special: bool, min_output: int = 1
    ) -> list[int]:
        if len(text) > self._max_chars:
            raise Refused(
                f"This model's maximum context length is {self.max_model_len} tokens. However,"
                f" your {param} resulted in {len(text)} characters, more than any"
                f" {self.max_model_len} tokens can hold. Please reduce the length of the {param}.",
                param,
                "context_length_exceeded",
            )
        token_ids = self.tokenizer.encode(text, add_special=add_special)
        self._check_length(len(token_ids), param, min_output)
        return token_ids

    def _check_length(self, num_tokens: int, param: str, min_output: int) -> None:
        if num_tokens + min_output > self.max_model_len:
            without_room = ", which leaves no room for an answer" if min_output else ""
            raise Refused(
                f"This model's maximum context length is {self.max_model_len} tokens. However,"
                f" your {param} resulted in {num_tokens} tokens{without_room}."
                f" Please reduce the length of the {param}.",
                param,
                "context_length_exceeded",
            )


def make_rows(request: Generate, prompts: list[Prompt], row_prefix: str) -> list[GenerationRequest]:
    """One engine request for each choice, or candidate. With a seed, number k of a prompt draws with seed + k."""
    rows: list[GenerationRequest] = []
    ranked = request.best_of > request.n and request.params.logprobs is None
    first = msgspec.structs.replace(request.params, logprobs=0) if ranked else request.params
    for i, prompt in enumerate(prompts):
        for k in range(request.rows_per_prompt):
            params = first
            if k and params.seed is not None:
                params = msgspec.structs.replace(params, seed=_wrap(params.seed + k))
            rows.append(
                GenerationRequest(
                    f"{row_prefix}{i * request.rows_per_prompt + k}",
                    prompt.token_ids,
                    params,
                    request.klass,
                    request.cache_salt,
                    _start_grammar(prompt),
                    prompt.markers,
                    request.objective,
                    request.embedding,
                )
            )
    return rows


def _start_grammar(prompt: Prompt) -> TokenGrammar | None:
    """Thoughts are free; what follows them is not."""
    if prompt.grammar is None:
        return None
    return prompt.grammar.start(CLOSING.encode() if prompt.in_reasoning else b"")


def _wrap(seed: int) -> int:
    return (seed + 2**63) % 2**64 - 2**63


def _chat_chars(request: Generate) -> int:
    """Text to tokenize, with something for what it takes to render each message and tool."""
    messages, tools = request.messages or [], request.tools or []
    return sum(len(m["content"]) + 100 for m in messages) + 1000 * len(tools)
