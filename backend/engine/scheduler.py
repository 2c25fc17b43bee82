"""What runs in the next step, and who gets the blocks.

There are no phases: every request has `num_computed_tokens` and wants the rest of its tokens computed.
Prefix hits, chunked prefill and resuming after preemption are all "let computed catch up".

A step is filled in this order: online rows that decode, online prefill, background rows that decode, background
prefill; the latter two only as far as the deadlines of the online rows allow (see `pace.py`). Prefill of one class goes
by deadline plus the time that the rest of the prompt takes: a short prompt passes a long one, but a long one is passed
only by what comes within the time that it takes itself.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

from backend.engine.block_pool import NULL_BLOCK, BlockPool
from backend.engine.config import EngineConfig
from backend.engine.pace import Pace
from backend.engine.params import RequestClass
from backend.engine.request import EngineRequest, Status
from backend.engine.step_budget import StepBudget
from backend.engine.urgency import AGEING_INTERVAL_S, PATIENCE_S, is_online
from backend.models.batch import cdiv

MAX_SKIPS = 64  # later requests of its class that may pass one that waits for blocks
LOOKAHEAD = 32  # waiting requests that one step looks at
WATERMARK = 0.01  # share of the pool that admission leaves free for those already running


class Scheduled(NamedTuple):
    """`num_tokens` tokens of `request` are computed in this step, from `num_computed_tokens` on."""

    request: EngineRequest
    num_tokens: int


class Scheduler:
    """Owns the waiting and running lists and every request's blocks and slot.

    A waiting request is admitted only with the blocks of its whole (re)prefill in hand, so a long prompt is
    never evicted half-way for lack of its own blocks. The best-ranked running request is never preempted for
    another, so some request always finishes.
    """

    def __init__(self, config: EngineConfig, pool: BlockPool, window: int | None = None) -> None:
        """`window`: how many tokens back any layer of the model looks, its own included; None: to the beginning."""
        self.pool = pool
        self.pace = Pace()
        self.waiting: list[EngineRequest] = []  # by queue_rank
        self.running: list[EngineRequest] = []  # by run_rank
        self.num_preemptions = 0
        self._block_size = config.block_size
        self._max_num_batched_tokens = config.max_num_batched_tokens
        # Every decoding request can get its token in every step.
        self._max_num_seqs = min(config.max_num_seqs, config.max_num_batched_tokens)
        self._use_prefix_cache = config.enable_prefix_cache
        self._watermark = max(1, int(WATERMARK * pool.num_blocks))
        self._free_slots = list(range(self._max_num_seqs))[::-1]
        self._window = window
        self._num_window_blocks = (
            None if window is None else max(1, cdiv(window - 1, config.block_size))
        )
        self._guest: EngineRequest | None = None  # see `urgency.py`
        self._ageing_due_s = 0.0

    def add(self, request: EngineRequest) -> None:
        self._enqueue(request)

    def schedule(self, now_s: float) -> list[Scheduled]:
        """The next step's work. `now_s` is on the clock of the requests' `arrival_s`."""
        self._choose_guest(now_s)
        self._yield_to_better_class()
        num_preemptions = self.num_preemptions
        budget = StepBudget(self._max_num_batched_tokens)
        scheduled = self._decode(budget, online=True)
        online = [r for r in self.running if is_online(r.klass)]
        decoding = [request for request in online if request.is_decoding]
        budget.narrow(self.pace.prefill_rows(decoding, now_s))
        is_blocked = self.num_preemptions > num_preemptions or self._admit(budget, online=True)
        scheduled += self._prefill(budget, scheduled, online=True)

        prefilling = [r for r in self.running if is_online(r.klass) and not r.is_decoding]
        prefilling += [request for request in self.waiting if is_online(request.klass)]
        budget.narrow(self.pace.background_rows(budget.num_taken, decoding, prefilling, now_s))
        scheduled += self._decode(budget, online=False)
        if not decoding and not prefilling:
            budget.narrow(self.pace.idle_rows())
        if not is_blocked and self.num_preemptions == num_preemptions:
            self._admit(budget, online=False)
        scheduled += self._prefill(budget, scheduled, online=False)
        for request, _ in scheduled:
            request.moved_s = now_s
        return scheduled

    def record_step(self, num_rows: int, seconds: float) -> None:
        """What a step of so many rows took."""
        self.pace.step_time.add(num_rows, seconds)

    def finish(self, request: EngineRequest) -> None:
        """Take a request out, wherever it is, and free what it owns."""
        if request.status is Status.WAITING:
            self.waiting.remove(request)
        elif request.status is Status.RUNNING:
            self._release(request)
        request.status = Status.FINISHED
        if request is self._guest:
            self._guest = None

    def publish(self, request: EngineRequest) -> None:
        """Offer the blocks that the finished step filled to later requests, and give up those no longer seen."""
        num_full = request.num_computed_tokens // self._block_size
        if self._use_prefix_cache and num_full > request.num_published_blocks:
            request.extend_keys(self._block_size)
            for index in range(request.num_published_blocks, num_full):
                self.pool.publish(request.block_table[index], request.block_keys[index])
            request.num_published_blocks = num_full
        if self._window is not None:
            self._hide(request, request.num_computed_tokens - self._window + 1)

    def _hide(self, request: EngineRequest, num_tokens: int) -> None:
        """Free the blocks that lie wholly in the first `num_tokens`: the next token does not look at them.

        The front is evicted first: a hit behind a window needs the last blocks of its prefix.
        """
        start, end = request.num_hidden_blocks, max(0, num_tokens) // self._block_size
        if end > start:
            front_last = request.block_table[start:end][::-1]
            self.pool.free(front_last, online=is_online(request.klass))
            request.block_table[start:end] = [NULL_BLOCK] * (end - start)
            request.num_hidden_blocks = end

    # -- rows for this step ------------------------------------------------------------------------------------------

    def _decode(self, budget: StepBudget, *, online: bool) -> list[Scheduled]:
        decoding = list(self._grow_decoding(budget, online))
        return [Scheduled(request, 1 + self._grant(request, budget)) for request in decoding]

    def _grow_decoding(self, budget: StepBudget, online: bool) -> Iterator[EngineRequest]:
        """Decoding requests, best first, each with a block for its token; the worst are preempted for want of one."""
        index = 0
        while index < len(self.running) and budget.num_tokens > 0:
            request = self.running[index]
            if request.is_decoding and request.is_online == online:
                if not self._grow(request):
                    self._preempt(self.running[-1])  # never one before `index`: those are scheduled
                    continue
                budget.take(1)
                yield request
            index += 1

    def _grow(self, request: EngineRequest) -> bool:
        if len(request.block_table) * self._block_size >= request.num_tokens:
            return True
        blocks = self.pool.allocate(1)
        request.block_table += blocks or []
        return blocks is not None

    def _grant(self, request: EngineRequest, budget: StepBudget) -> int:
        """Room for guesses: half of what the step has left, and blocks that nobody is waiting for."""
        num_guesses = min(request.drafts.num_wanted, budget.num_tokens // 2)
        num_missing = self._num_blocks_missing(request, num_guesses)
        if num_missing > 0:
            if num_missing + self._watermark <= self.pool.num_free:
                request.block_table += self.pool.allocate(num_missing) or []
            else:
                num_guesses = len(request.block_table) * self._block_size - request.num_tokens
        budget.take(num_guesses)
        request.drafts.num_granted = num_guesses
        del request.drafts.token_ids[num_guesses:]
        return num_guesses

    def _num_blocks_missing(self, request: EngineRequest, num_more: int) -> int:
        return cdiv(request.num_tokens + num_more, self._block_size) - len(request.block_table)

    def _prefill(
        self, budget: StepBudget, scheduled: list[Scheduled], *, online: bool
    ) -> list[Scheduled]:
        """Everything that is not in the step yet; an admitted request may have a single token left to compute."""
        decoding = {request for request, _ in scheduled}
        rest = [r for r in self.running if r.is_online == online and r not in decoding]
        granted = [(r, budget.take_prefill(r)) for r in sorted(rest, key=self._prefill_rank)]
        return [Scheduled(request, num_tokens) for request, num_tokens in granted if num_tokens]

    def _prefilling(self, online: bool) -> list[EngineRequest]:
        return [r for r in self.running if not r.is_decoding and r.is_online == online]

    def _prefill_rank(self, request: EngineRequest) -> tuple[RequestClass, float, int]:
        rest_s = request.num_wanted_tokens * self.pace.step_time.seconds_per_row
        return request.served_as, request.deadline_s + rest_s, request.arrival

    # -- admission ---------------------------------------------------------------------------------------------------

    def _admit(self, budget: StepBudget, *, online: bool) -> bool:
        """Take in waiting requests that this step has tokens for -> whether blocks are what others wait for."""
        blocked: EngineRequest | None = None
        prefills = self._prefilling(online)
        start = 0 if online else bisect_left(self.waiting, (RequestClass.FLEX,), key=_queue_rank)
        index = start
        while index < min(len(self.waiting), start + LOOKAHEAD) and self._free_slots:
            request = self.waiting[index]
            if (
                request.is_online != online
                or self._num_ahead(request, prefills) >= budget.num_tokens
            ):
                break
            if blocked and (
                request.served_as != blocked.served_as or blocked.num_skipped >= MAX_SKIPS
            ):
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
                prefills.append(request)
                if blocked:
                    blocked.num_skipped += 1
        return blocked is not None

    def _num_ahead(self, request: EngineRequest, prefills: list[EngineRequest]) -> int:
        """Tokens of prefill that come before this request's first."""
        rank = self._prefill_rank(request)
        return sum(r.num_wanted_tokens for r in prefills if self._prefill_rank(r) < rank)

    def _start(self, request: EngineRequest, hits: list[int]) -> None:
        self.pool.acquire(hits)
        new_blocks = self.pool.allocate(self._num_blocks(request) - len(hits))
        assert new_blocks is not None  # `_fits` has just counted them
        request.block_table = hits + new_blocks
        request.num_computed_tokens = len(hits) * self._block_size
        request.num_published_blocks = len(hits)
        request.num_hidden_blocks = hits.count(NULL_BLOCK)
        if request.num_preemptions == 0:
            request.num_cached_tokens = request.num_computed_tokens
        request.slot = self._free_slots.pop()
        request.status = Status.RUNNING
        insort(self.running, request, key=_run_rank)

    def _lookup(self, request: EngineRequest) -> list[int]:
        """Cached blocks at its front; at least its last token is left to compute, or there were no logits."""
        if self._use_prefix_cache:  # output since it was queued, if it was preempted
            request.extend_keys(self._block_size)
        keys = request.block_keys[: request.max_cached_tokens // self._block_size]
        return self.pool.lookup(keys, self._num_window_blocks)

    def _prefix_is_under_way(self, request: EngineRequest, index: int) -> bool:
        """Whether a running prefill of no worse class is about to publish this one's next block.

        Only running requests count, so nobody waits for one that was aborted or preempted.
        """
        if index >= request.max_cached_tokens // self._block_size or not self._use_prefix_cache:
            return False
        key = request.block_keys[index]
        return any(
            not other.is_decoding
            and other.served_as <= request.served_as
            and other.num_computed_tokens < (index + 1) * self._block_size
            and len(other.block_keys) > index
            and other.block_keys[index].digest == key.digest
            for other in self.running
        )

    def _fits(self, request: EngineRequest, hits: list[int]) -> bool:
        num_taken = self._num_blocks(request) - len(hits) + self.pool.num_unowned(hits)
        return num_taken + self._reserve(request) <= self.pool.num_free

    def _reserve(self, request: EngineRequest) -> int:
        """Blocks that those already running may need soon; background work leaves one for each online row."""
        if not self.running:
            return 0
        if request.is_online:
            return self._watermark
        return self._watermark + sum(other.is_online for other in self.running)

    def _num_blocks(self, request: EngineRequest) -> int:
        return cdiv(request.num_tokens, self._block_size)

    # -- who gives way -----------------------------------------------------------------------------------------------

    def _choose_guest(self, now_s: float) -> None:
        """Whoever has not moved for longest beyond its class's patience, if nobody is the guest yet."""
        if self._guest is not None or now_s < self._ageing_due_s:
            return
        self._ageing_due_s = now_s + AGEING_INTERVAL_S
        overdue = [
            request
            for request in chain(self.waiting, self.running)
            if now_s - request.moved_s > PATIENCE_S[request.klass]
        ]
        if not overdue:
            return
        guest = self._guest = min(overdue, key=lambda request: (request.moved_s, request.arrival))
        if guest.status is Status.WAITING:
            self.waiting.remove(guest)
            guest.serve_as(RequestClass.INTERACTIVE)
            self._enqueue(guest)
        else:
            self.running.remove(guest)
            guest.serve_as(RequestClass.INTERACTIVE)
            insort(self.running, guest, key=_run_rank)

    def _yield_to_better_class(self) -> None:
        """Preempt worse classes while the first waiting request lacks a slot or blocks, if that is what it takes.

        Not for the guest: it takes the next place that comes free.
        """
        first = next((r for r in self.waiting if r is not self._guest), None)
        if first is None or not self.running or self.running[-1].served_as <= first.served_as:
            return
        hits = self._lookup(first)
        if self._prefix_is_under_way(first, len(hits)) or not self._could_fit(first, hits):
            return
        while self.running and self.running[-1].served_as > first.served_as:
            if self._free_slots and self._fits(first, self._lookup(first)):
                return
            self._preempt(self.running[-1])

    def _could_fit(self, request: EngineRequest, hits: list[int]) -> bool:
        """Whether it fits once every running request of a worse class has given up its blocks."""
        if self._fits(request, hits):
            return True
        worse = [r for r in self.running if r.served_as > request.served_as]
        owners = Counter(block for r in worse for block in r.block_table if block != NULL_BLOCK)
        freed = [b for b, num_owners in owners.items() if self.pool.ref_counts[b] == num_owners]
        num_hits_freed = len(set(hits).intersection(freed))
        num_taken = self._num_blocks(request) - len(hits) + self.pool.num_unowned(hits)
        reserve = 0 if len(worse) == len(self.running) else self._reserve(request)
        return num_taken + num_hits_freed + reserve <= self.pool.num_free + len(freed)

    def _preempt(self, request: EngineRequest) -> None:
        """Back to the queue; its tokens stay, what was computed of them is recomputed (or found in the cache)."""
        self._release(request)
        request.status = Status.WAITING
        request.num_preemptions += 1
        self.num_preemptions += 1
        self._enqueue(request)

    def _enqueue(self, request: EngineRequest) -> None:
        rest_s = request.num_tokens * self.pace.step_time.seconds_per_row
        request.rank_s = request.deadline_s + rest_s
        insort(self.waiting, request, key=_queue_rank)

    def _release(self, request: EngineRequest) -> None:
        self.running.remove(request)
        self.pool.free(request.block_table, online=is_online(request.klass))
        self._free_slots.append(request.slot)
        request.block_table = []
        request.drafts.release()
        request.num_computed_tokens = request.num_published_blocks = 0
        request.num_mirrored_blocks = request.num_hidden_blocks = 0


def _queue_rank(request: EngineRequest) -> tuple[RequestClass, bool, float, int]:
    return request.queue_rank


def _run_rank(request: EngineRequest) -> tuple[RequestClass, int]:
    return request.run_rank
