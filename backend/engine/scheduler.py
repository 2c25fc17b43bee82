"""What runs in the next step, and who gets the blocks.

There are no phases: every request has `num_computed_tokens` and wants the rest of its tokens computed.
Prefix hits, chunked prefill and resuming after preemption are all "let computed catch up".
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from typing import NamedTuple

from backend.engine.block_pool import BlockPool
from backend.engine.config import EngineConfig
from backend.engine.request import EngineRequest, Status
from backend.models.batch import cdiv

MAX_SKIPS = 64  # later requests of its class that may pass one that waits for blocks
LOOKAHEAD = 32  # waiting requests that one step looks at
MAX_SCORED_ROWS = (
    256  # a step's rows of prompts whose logprobs are asked for: each makes a row of logits
)
WATERMARK = 0.01  # share of the pool that admission leaves free for those already running


class Scheduled(NamedTuple):
    """`num_tokens` tokens of `request` are computed in this step, from `num_computed_tokens` on."""

    request: EngineRequest
    num_tokens: int


class _Budget:
    """What is left of one step."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self._num_scored_rows = MAX_SCORED_ROWS

    def take(self, request: EngineRequest) -> int:
        """Tokens of this request's prefill that the step has room for."""
        num_tokens = min(request.num_wanted_tokens, self.num_tokens)
        if request.num_unscored_tokens:
            num_tokens = min(num_tokens, self._num_scored_rows)
            self._num_scored_rows -= num_tokens
        self.num_tokens -= num_tokens
        return num_tokens


class Scheduler:
    """Owns the waiting and running lists and every request's blocks and slot.

    A waiting request is admitted only with the blocks of its whole (re)prefill in hand, so a long prompt is
    never evicted half-way for lack of its own blocks. The best-ranked running request is never preempted for
    another, so some request always finishes.
    """

    def __init__(self, config: EngineConfig, pool: BlockPool) -> None:
        self.pool = pool
        self.waiting: list[EngineRequest] = []  # by queue_rank
        self.running: list[EngineRequest] = []  # by run_rank
        self.num_preemptions = 0
        self._block_size = config.block_size
        self._max_num_batched_tokens = config.max_num_batched_tokens
        # Every decoding request gets its token in every step.
        self._max_num_seqs = min(config.max_num_seqs, config.max_num_batched_tokens)
        self._use_prefix_cache = config.enable_prefix_cache
        self._watermark = max(1, int(WATERMARK * pool.num_blocks))
        self._free_slots = list(range(self._max_num_seqs))[::-1]

    def add(self, request: EngineRequest) -> None:
        insort(self.waiting, request, key=_queue_rank)

    def schedule(self) -> list[Scheduled]:
        """The next step's work: decoding rows, then prefills under way, then new admissions."""
        self._yield_to_better_class()
        num_preemptions = self.num_preemptions
        decoding = list(self._grow_decoding())
        budget = _Budget(self._max_num_batched_tokens - len(decoding))
        scheduled = [Scheduled(request, 1 + self._grant(request, budget)) for request in decoding]
        scheduled += self._continue_prefills(budget)
        if self.num_preemptions == num_preemptions:
            scheduled += self._admit(budget)
        return scheduled

    def finish(self, request: EngineRequest) -> None:
        """Take a request out, wherever it is, and free what it owns."""
        if request.status is Status.WAITING:
            self.waiting.remove(request)
        elif request.status is Status.RUNNING:
            self._release(request)
        request.status = Status.FINISHED

    def publish(self, request: EngineRequest) -> None:
        """Offer the blocks that the finished step filled to later requests."""
        num_full = request.num_computed_tokens // self._block_size
        if not self._use_prefix_cache or num_full == request.num_published_blocks:
            return
        request.extend_keys(self._block_size)
        for index in range(request.num_published_blocks, num_full):
            self.pool.publish(request.block_table[index], request.block_keys[index])
        request.num_published_blocks = num_full

    def _continue_prefills(self, budget: _Budget) -> Iterator[Scheduled]:
        for request in self.running:
            if request.num_wanted_tokens > 1 and (num_tokens := budget.take(request)):
                yield Scheduled(request, num_tokens)

    def _grow_decoding(self) -> Iterator[EngineRequest]:
        """Decoding requests, best first, each with a block for its token; the worst are preempted for want of one."""
        index = 0
        while index < len(self.running):
            request = self.running[index]
            if request.num_wanted_tokens == 1:
                if not self._grow(request):
                    self._preempt(self.running[-1])  # never one before `index`: those are scheduled
                    continue
                yield request
            index += 1

    def _grow(self, request: EngineRequest) -> bool:
        if len(request.block_table) * self._block_size >= request.num_tokens:
            return True
        blocks = self.pool.allocate(1)
        request.block_table += blocks or []
        return blocks is not None

    def _grant(self, request: EngineRequest, budget: _Budget) -> int:
        """Room for guesses: half of what the step has left, and blocks that nobody is waiting for."""
        num_guesses = min(request.drafts.num_wanted, budget.num_tokens // 2)
        num_missing = self._num_blocks_missing(request, num_guesses)
        if num_missing > 0:
            if num_missing + self._watermark <= self.pool.num_free:
                request.block_table += self.pool.allocate(num_missing) or []
            else:
                num_guesses = len(request.block_table) * self._block_size - request.num_tokens
        budget.num_tokens -= num_guesses
        request.drafts.num_granted = num_guesses
        del request.drafts.token_ids[num_guesses:]
        return num_guesses

    def _num_blocks_missing(self, request: EngineRequest, num_more: int) -> int:
        return cdiv(request.num_tokens + num_more, self._block_size) - len(request.block_table)

    def _admit(self, budget: _Budget) -> Iterator[Scheduled]:
        blocked: EngineRequest | None = None
        index = 0
        while (
            budget.num_tokens > 0 and index < min(len(self.waiting), LOOKAHEAD) and self._free_slots
        ):
            request = self.waiting[index]
            if blocked and (request.klass != blocked.klass or blocked.num_skipped >= MAX_SKIPS):
                break
            hits = self._lookup(request)
            if self._prefix_is_under_way(request, len(hits)):
                index += 1
            elif not self._fits(request, hits):
                blocked = blocked or request
                index += 1
            else:
                self.waiting.pop(index)
                self._start(request, hits)
                if blocked:
                    blocked.num_skipped += 1
                if num_tokens := budget.take(request):
                    yield Scheduled(request, num_tokens)

    def _start(self, request: EngineRequest, hits: list[int]) -> None:
        self.pool.acquire(hits)
        new_blocks = self.pool.allocate(self._num_blocks(request) - len(hits))
        assert new_blocks is not None  # `_fits` has just counted them
        request.block_table = hits + new_blocks
        request.num_computed_tokens = len(hits) * self._block_size
        request.num_published_blocks = len(hits)
        if request.num_preemptions == 0:
            request.num_cached_tokens = request.num_computed_tokens
        request.slot = self._free_slots.pop()
        request.status = Status.RUNNING
        insort(self.running, request, key=_run_rank)

    def _lookup(self, request: EngineRequest) -> list[int]:
        """Cached blocks at its front; at least its last token is left to compute, or there were no logits."""
        if self._use_prefix_cache:  # output since it was queued, if it was preempted
            request.extend_keys(self._block_size)
        return self.pool.lookup(request.block_keys[: request.max_cached_tokens // self._block_size])

    def _prefix_is_under_way(self, request: EngineRequest, index: int) -> bool:
        """Whether a running request of no worse class is about to publish this one's next block."""
        if index >= request.max_cached_tokens // self._block_size or not self._use_prefix_cache:
            return False
        key = request.block_keys[index]
        return any(
            other.klass <= request.klass
            and other.num_computed_tokens < (index + 1) * self._block_size
            and len(other.block_keys) > index
            and other.block_keys[index].digest == key.digest
            for other in self.running
        )

    def _fits(self, request: EngineRequest, hits: list[int]) -> bool:
        num_taken = self._num_blocks(request) - len(hits) + self.pool.num_unowned(hits)
        watermark = self._watermark if self.running else 0
        return num_taken + watermark <= self.pool.num_free

    def _num_blocks(self, request: EngineRequest) -> int:
        return cdiv(request.num_tokens, self._block_size)

    def _yield_to_better_class(self) -> None:
        """Preempt worse classes while the first waiting request lacks a slot or blocks."""
        if not self.waiting:
            return
        first = self.waiting[0]
        while self.running and self.running[-1].klass > first.klass:
            if self._free_slots and self._fits(first, self._lookup(first)):
                return
            self._preempt(self.running[-1])

    def _preempt(self, request: EngineRequest) -> None:
        """Back to the queue; its tokens stay, what was computed of them is recomputed (or found in the cache)."""
        self._release(request)
        request.status = Status.WAITING
        request.num_preemptions += 1
        self.num_preemptions += 1
        insort(self.waiting, request, key=_queue_rank)

    def _release(self, request: EngineRequest) -> None:
        self.running.remove(request)
        self.pool.free(request.block_table)
        self._free_slots.append(request.slot)
        request.block_table = []
        request.drafts.release()
        request.num_computed_tokens = request.num_published_blocks = request.num_mirrored_blocks = 0


def _queue_rank(request: EngineRequest) -> tuple[int, bool, int]:
    return request.queue_rank


def _run_rank(request: EngineRequest) -> tuple[int, int]:
    return request.run_rank
