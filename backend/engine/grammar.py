"""Grammars that hold what is generated to a form, over llguidance: a mask of legal tokens for each position.

A grammar is compiled once and copied for each request. A request's copy follows its tokens: `accept` moves it on,
`rollback` back. Its mask is a pure function of the tokens accepted, so speculation, preemption and neighbours
cannot change what is legal.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import TYPE_CHECKING, Protocol

import numpy as np

from backend.engine.grammar_spec import WHITESPACE, GrammarSpec, InvalidGrammar, check_size
from backend.engine.params import TokenConstraint

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

CACHE_SIZE = 128  # compiled grammars; a matcher takes some 100 kB


class GrammarTokenizer(Protocol):
    vocab_size: int
    eos_ids: frozenset[int]

    def encode(
        self, text: str, *, add_special: bool = False, parse_special: bool = True
    ) -> list[int]: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def token_text(self, token_id: int) -> str: ...

    def is_special(self, token_id: int) -> bool: ...


class TokenGrammar:
    """How far one request has come in its grammar. One thread at a time.

    `after`: the grammar begins behind this text (a reasoning block's end); what comes before is free.
    """

    def __init__(self, matcher: LLMatcher, tokenizer: GrammarTokenizer, after: bytes = b"") -> None:
        self._matcher = matcher
        self._tokenizer = tokenizer
        self._after = after
        self._free: list[bytes] = []  # tokens before `after` has come
        self._waiting = bool(after)
        self._num_matched = 0
        self._mask: bytes | None = None  # of the position that comes next

    @property
    def error(self) -> str:
        """Why the grammar cannot go on: a limit of its own, or a token it does not allow. "": all is well."""
        return _one_line(self._matcher.get_error()) if self._matcher.is_error() else ""

    @property
    def is_finished(self) -> bool:
        """Nothing but the end of the turn may follow."""
        return not self._waiting and self._matcher.is_stopped() and not self._matcher.is_error()

    def prepare(self) -> None:
        """Compute the mask of the next position, on any thread; without it `apply` does."""
        if self._mask is None and not self._waiting:
            self._mask = self._matcher.compute_bitmask()

    def apply(self, logits: np.ndarray) -> None:
        """Take every token that is not legal next out of `logits` [vocab_size], in place."""
        if self._waiting:
            return
        self.prepare()
        assert self._mask is not None
        bits = np.unpackbits(np.frombuffer(self._mask, np.uint8), bitorder="little")
        num_known = min(len(bits), len(logits))
        logits[:num_known][bits[:num_known] == 0] = -np.inf
        logits[num_known:] = -np.inf
        if self._matcher.is_error():
            logits[:] = -np.inf

    def accept(self, token_id: int) -> None:
        self._mask = None
        if self._waiting:
            self._free.append(_spelled(self._tokenizer, token_id))
            tail = b"".join(self._free[-len(self._after) - 1 :])
            self._waiting = self._after not in tail
        else:
            self._num_matched += 1
            self._matcher.consume_token(token_id)

    def rollback(self, num_tokens: int) -> None:
        """Take back the last `num_tokens` accepted."""
        self._mask = None
        num_matched = min(num_tokens, self._num_matched)
        if num_matched:
            self._matcher.rollback(num_matched)
            self._num_matched -= num_matched
        if num_tokens > num_matched:
            del self._free[num_matched - num_tokens :]
            self._waiting = True


class CompiledGrammar:
    def __init__(self, matcher: LLMatcher, tokenizer: GrammarTokenizer) -> None:
        self._matcher = matcher
        self._tokenizer = tokenizer

    def start(self, after: bytes = b"") -> TokenGrammar:
        return TokenGrammar(self._matcher.deep_copy(), self._tokenizer, after)


class GrammarCompiler:
    """Compiles for one tokenizer and keeps the latest. Threads may share it; compiling gives up the GIL.

    Making one holds the GIL, a second for 100k tokens: have it before there is anything to hold up.
    """

    def __init__(self, tokenizer: GrammarTokenizer) -> None:
        self._tokenizer = tokenizer
        self._core = _core_tokenizer(tokenizer)
        self._compiled: dict[GrammarSpec, CompiledGrammar] = {}
        self._lock = Lock()

    def has(self, spec: GrammarSpec) -> bool:
        return spec in self._compiled

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """Raises InvalidGrammar."""
        found = self._compiled.get(spec)  # without the lock: another thread may hold it for seconds
        if found is not None:
            return found
        with self._lock:
            compiled = CompiledGrammar(self._matcher(spec), self._tokenizer)
            self._compiled[spec] = compiled
            if len(self._compiled) > CACHE_SIZE:
                del self._compiled[next(iter(self._compiled))]
            return compiled

    def _matcher(self, spec: GrammarSpec) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits

        check_size(spec)
        limits = LLParserLimits(verbose_errors=False)
        matcher = LLMatcher(self._core, _source(spec), log_level=0, limits=limits)
        if matcher.is_error():
            raise InvalidGrammar(_one_line(matcher.get_error()))
        probe = matcher.deep_copy()
        probe.compute_bitmask()  # tells of a grammar that nothing can match
        if probe.is_error():
            raise InvalidGrammar(f"nothing can match it: {_one_line(probe.get_error())}")
        return matcher


class MaskThread:
    """Computes the masks of one step while the model runs: llguidance and the forward pass both give up the GIL."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, "grammar-masks")

    def begin(self, grammars: Sequence[TokenConstraint | None]) -> Future[None]:
        """Have them all prepared when the future is done; None stands for a request without a grammar."""
        wanted = [grammar for grammar in grammars if grammar is not None]
        return self._executor.submit(_prepare_all, wanted) if wanted else _NOTHING_TO_DO


_NOTHING_TO_DO: Future[None] = Future()
_NOTHING_TO_DO.set_result(None)


def _prepare_all(grammars: Sequence[TokenConstraint]) -> None:
    for grammar in grammars:
        grammar.prepare()


def _one_line(error: str) -> str:
    return " ".join(error.split())[:500]


def _source(spec: GrammarSpec) -> str:
    from llguidance import LLMatcher

    if spec.kind == "json_schema":
        try:
            return LLMatcher.grammar_from_json_schema(
                spec.text, overrides={"whitespace_pattern": WHITESPACE, "lenient": spec.lenient}
            )
        except ValueError as exc:
            raise InvalidGrammar(str(exc)) from exc
    if spec.kind == "regex":
        return LLMatcher.grammar_from_regex(spec.text)
    if spec.kind == "choice":
        choices: list[str] = json.loads(spec.text)
        return "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in choices)
    return _lark(spec.text)


def _lark(text: str) -> str:
    """GBNF, the notation of llama.cpp, is told by its `::=` and translated."""
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return any_to_lark(text)
    except Exception as exc:  # a translator of few lines: anything may come out of it
        raise InvalidGrammar(f"neither Lark nor GBNF: {exc}") from exc


def _core_tokenizer(tokenizer: GrammarTokenizer) -> LLTokenizer:
    from llguidance import LLTokenizer, TokenizerWrapper

    return LLTokenizer(
        TokenizerWrapper(_Spelling(tokenizer)),
        n_vocab=tokenizer.vocab_size,
        eos_token=sorted(tokenizer.eos_ids),
    )


class _Spelling:
    """A tokenizer as llguidance asks for it: every token's bytes, special ones by name."""

    def __init__(self, tokenizer: GrammarTokenizer) -> None:
        ids = range(tokenizer.vocab_size)
        self.eos_token_id = min(tokenizer.eos_ids)
        self.bos_token_id = None
        self.tokens = [_spelled(tokenizer, i) for i in ids]
        self.special_token_ids = [i for i in ids if tokenizer.is_special(i)]
        self._tokenizer = tokenizer

    def __call__(self, text: bytes) -> list[int]:
        return self._tokenizer.encode(text.decode("utf-8", "replace"), parse_special=False)


def _spelled(tokenizer: GrammarTokenizer, token_id: int) -> bytes:
    if tokenizer.is_special(token_id):
        return tokenizer.token_text(token_id).encode()
    return tokenizer.token_bytes(token_id)
