"""One sequence on its way through the engine: what it is, how far it is computed, what it owns."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from backend.engine import urgency
from backend.engine.block_pool import BlockKey, extend_keys
from backend.engine.detokenizer import Detokenizer
from backend.engine.drafts import Drafts
from backend.engine.logit_rules import LogitRules
from backend.engine.params import (
    Objective,
    RequestClass,
    SamplingParams,
    TokenConstraint,
    TokenLogprob,
)
from backend.engine.pooling import Pooler


class Status(Enum):
    WAITING = auto()  # owns no blocks
    RUNNING = auto()  # owns blocks and a slot
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class EngineRequest:
    """`token_ids` is the prompt with the output behind it; `num_prompt_tokens` is the border, also after preemption."""

    request_id: str
    params: SamplingParams
    klass: RequestClass
    arrival: int  # counts requests, breaks ties within a class
    arrival_s: float
    token_ids: list[int]
    num_prompt_tokens: int
    max_output_tokens: int
    seed: int  # 64 bits: the caller's, or fresh entropy
    root: bytes  # parent of the first block's key
    detokenizer: Detokenizer
    rules: LogitRules | None  # None: the logits are used as they come
    grammar: TokenConstraint | None = None  # None: every token is legal
    markers: dict[int, bytes] = field(default_factory=dict[int, bytes])  # special tokens to show
    objective: Objective = Objective()
    pooler: Pooler | None = None  # a vector is wanted in place of an answer

    served_as: RequestClass = field(init=False)  # its class, or a better one while it is the guest
    is_online: bool = field(init=False)  # served as one that somebody waits for
    deadline_s: float = field(init=False)  # of the first token
    moved_s: float = field(init=False)  # when it last had a place in a step, or arrived
    rank_s: float = field(
        init=False
    )  # its deadline and what it takes to compute; set by the scheduler
    first_token_s: float | None = None
    status: Status = Status.WAITING
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0  # prompt tokens found in the cache at first admission
    num_preemptions: int = 0
    num_skipped: int = 0  # admissions of later requests while this one did not fit
    block_table: list[int] = field(default_factory=list[int])
    block_keys: list[BlockKey] = field(default_factory=list[BlockKey])
    num_published_blocks: int = 0
    num_hidden_blocks: int = 0  # at the front, behind the sliding window: NULL_BLOCK in block_table
    slot: int = 0  # row in the runner's block table; set by the scheduler, valid while RUNNING
    num_mirrored_blocks: int = 0  # entries of block_table that the runner's row holds
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])
    drafts: Drafts = field(default_factory=Drafts)
    sum_logprobs: float = 0.0  # of the output, where logprobs are asked for

    def __post_init__(self) -> None:
        self.served_as, self.is_online = self.klass, urgency.is_online(self.klass)
        self.deadline_s = urgency.deadline_s(self.arrival_s, self.klass, self.objective)
        self.moved_s, self.rank_s = self.arrival_s, self.deadline_s

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_wanted_tokens(self) -> int:
        """Tokens that are known and not yet computed: 1 when decoding, more in (re)prefill."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_unscored_tokens(self) -> int:
        """Prompt tokens whose logprobs are asked for and not known yet."""
        if self.params.prompt_logprobs is None:
            return 0
        return self.num_prompt_tokens - len(self.prompt_logprobs)

    @property
    def max_cached_tokens(self) -> int:
        """How many tokens at its front may come from the cache: the rows behind them are needed for their logits.

        A vector needs them all.
        """
        if self.pooler is not None:
            return 0
        if self.num_unscored_tokens:
            return len(self.prompt_logprobs) - 1
        return len(self.token_ids) - 1

    @property
    def is_decoding(self) -> bool:
        """All known tokens are computed but the last."""
        return len(self.token_ids) - self.num_computed_tokens == 1

    @property
    def tpot_s(self) -> float | None:
        return None if self.objective.tpot_ms is None else self.objective.tpot_ms / 1000

    def next_token_due_s(self, tpot_s: float) -> float:
        """When the next token keeps that pace, counted from the first; infinity before there was one."""
        if self.first_token_s is None:
            return math.inf
        return self.first_token_s + self.num_output_tokens * tpot_s

    @property
    def queue_rank(self) -> tuple[RequestClass, bool, float, int]:
        """Smallest first: class, then whoever was preempted by arrival, then the others by deadline and length."""
        rank_s = 0.0 if self.num_preemptions else self.rank_s
        return self.served_as, self.num_preemptions == 0, rank_s, self.arrival

    @property
    def run_rank(self) -> tuple[RequestClass, int]:
        """Smallest first; the largest is the first to be preempted."""
        return self.served_as, self.arrival

    def serve_as(self, klass: RequestClass) -> None:
        """Rank it from here on like one of that class that came when it did."""
        self.served_as, self.is_online = klass, urgency.is_online(klass)
        self.deadline_s = min(
            self.deadline_s, urgency.deadline_s(self.arrival_s, klass, Objective())
        )

    def next_rows(self, num_tokens: int) -> Rows:
        """The next `num_tokens` to compute, guesses included as far as there are any."""
        start, end = self.num_computed_tokens, self.num_computed_tokens + num_tokens
        token_ids = self.token_ids[start:end]
        if self.pooler is not None:
            return Rows(self, start, token_ids, 0, self.pooler.num_wanted(start, end))
        token_ids += self.drafts.token_ids[: num_tokens - len(token_ids)]
        end = start + len(token_ids)
        first = self.max_cached_tokens if self.num_unscored_tokens else len(self.token_ids) - 1
        return Rows(self, start, token_ids, max(0, end - max(start, first)))

    def append(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        if self.rules is not None:
            self.rules.append(token_id)
        if self.grammar is not None:
            self.grammar.accept(token_id)

    def extend_keys(self, block_size: int) -> None:
        """None for a vector's: it shares no block, and thousands of texts read once must not push out prompts."""
        if self.pooler is None:
            extend_keys(self.block_keys, self.root, self.token_ids, block_size)


class Rows(NamedTuple):
    """Tokens of one request that a forward pass computes.

    Of the last `num_logits` the logits are wanted, of the last `num_hidden` the hidden states.
    """

    request: EngineRequest
    start: int  # position of the first
    token_ids: list[int]
    num_logits: int
    num_hidden: int = 0

    @property
    def num_outputs(self) -> int:
        return max(self.num_logits, self.num_hidden)

    @property
    def num_draws(self) -> int:
        """How many of those lead to tokens; the ones before only score the prompt."""
        return max(0, self.num_logits - self.request.num_unscored_tokens)
