"""Grammars that hold what is generated to a form, over llguidance: a mask of legal tokens for each position.

A grammar is compiled once and copied for each request. A request's copy follows its tokens: `accept` moves it on,
`rollback` back; guesses (speculative decoding) are followed on a copy of that. A mask is a pure function of the tokens
before it, so speculation, preemption and neighbours cannot change what is legal.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import takewhile
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
        self._guesses: list[int] = []  # that may come next,
        self._masks: list[bytes] = []  # and what is legal behind the first 0, 1, .. of them

    @property
    def error(self) -> str:
        """Why the grammar cannot go on: a limit of its own, or a token it does not allow. "": all is well."""
        return _one_line(self._matcher.get_error()) if self._matcher.is_error() else ""

    @property
    def is_finished(self) -> bool:
        """Nothing but the end of the turn may follow."""
        return not self._waiting and self._matcher.is_stopped() and not self._matcher.is_error()

    def num_legal(self, guesses: list[int]) -> int:
        """How many at the front may come next; where the grammar has not begun, all may."""
        return len(guesses) if self._waiting else self._matcher.validate_tokens(guesses)

    def forced(self) -> list[int]:
        """The tokens that spell what the grammar leaves no choice about; [] where it leaves one."""
        return [] if self._waiting else self._matcher.compute_ff_tokens()

    def prepare(self, guesses: Sequence[int] = ()) -> None:
        """Compute the masks of the next position and of the one behind each guess, on any thread.

        Without it `apply` does. Behind a guess that is not legal there is none.
        """
        if self._waiting:
            return
        same = sum(1 for _ in takewhile(_equal, zip(self._guesses, guesses, strict=False)))
        self._guesses = list(guesses)
        del self._masks[same + 1 :]
        if not self._masks:
            self._masks.append(self._matcher.compute_bitmask())
        if len(self._masks) > len(guesses):
            return
        ahead = self._matcher.deep_copy()  # 15 us; an error on the way stays with the copy
        ahead.try_consume_tokens(self._guesses[: len(self._masks) - 1])
        for token_id in self._guesses[len(self._masks) - 1 :]:
            if not ahead.try_consume_tokens([token_id]):
                break
            self._masks.append(ahead.compute_bitmask())

    def apply(self, logits: np.ndarray, guesses: Sequence[int] = ()) -> None:
        """Take every token that is not legal behind `guesses` out of `logits` [vocab_size], in place."""
        if self._waiting:
            return
        if len(self._masks) <= len(guesses) or self._guesses[: len(guesses)] != list(guesses):
            self.prepare(guesses)
        if self._matcher.is_error() or len(self._masks) <= len(guesses):
            logits[:] = -np.inf
            return
        bits = np.unpackbits(np.frombuffer(self._masks[len(guesses)], np.uint8), bitorder="little")
        num_known = min(len(bits), len(logits))
        logits[:num_known][bits[:num_known] == 0] = -np.inf
        logits[num_known:] = -np.inf

    def accept(self, token_id: int) -> None:
        if len(self._masks) > 1 and self._guesses[0] == token_id:
            del self._guesses[0], self._masks[0]
        else:
            self._forget_masks()
        if self._waiting:
            self._free.append(_spelled(self._tokenizer, token_id))
            tail = b"".join(self._free[-len(self._after) - 1 :])
            self._waiting = self._after not in tail
        else:
            self._num_matched += 1
            self._matcher.consume_token(token_id)

    def rollback(self, num_tokens: int) -> None:
        """Take back the last `num_tokens` accepted."""
        self._forget_masks()
        num_matched = min(num_tokens, self._num_matched)
        if num_matched:
            self._matcher.rollback(num_matched)
            self._num_matched -= num_matched
        if num_tokens > num_matched:
            del self._free[num_matched - num_tokens :]
            self._waiting = True

    def _forget_masks(self) -> None:
        self._guesses, self._masks = [], []


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

    def begin(self, wanted: Sequence[tuple[TokenConstraint, list[int]]]) -> Future[None]:
        """Have each grammar prepared, for its guesses too, when the future is done."""
        return self._executor.submit(_prepare_all, wanted) if wanted else _NOTHING_TO_DO


_NOTHING_TO_DO: Future[None] = Future()
_NOTHING_TO_DO.set_result(None)


def _prepare_all(wanted: Sequence[tuple[TokenConstraint, list[int]]]) -> None:
    for grammar, guesses in wanted:
        grammar.prepare(guesses)


def _equal(pair: tuple[int, int]) -> bool:
    return pair[0] == pair[1]


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
