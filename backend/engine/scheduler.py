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
from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

from backend.engine.block_pool import BlockPool
from backend.engine.config import EngineConfig
from backend.engine.pace import Pace
from backend.engine.params import RequestClass
from backend.engine.request import EngineRequest, Status
from backend.engine.request_blocks import RequestBlocks
from backend.engine.step_budget import StepBudget
from backend.engine.urgency import AGEING_INTERVAL_S, PATIENCE_S, is_online

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
        self.blocks = RequestBlocks(config, pool, window)
        self.pace = Pace()
        self.waiting: list[EngineRequest] = []  # by queue_rank
        self.running: list[EngineRequest] = []  # by run_rank
        self.num_preemptions = 0
        self._max_num_batched_tokens = config.max_num_batched_tokens
        # Every decoding request can get its token in every step.
        self._max_num_seqs = min(config.max_num_seqs, config.max_num_batched_tokens)
        self._watermark = max(1, int(WATERMARK * pool.num_blocks))
        self._free_slots = list(range(self._max_num_seqs))[::-1]
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
        decoding = [request for request, _ in scheduled if is_online(request.klass)]
        budget.narrow(self.pace.prefill_rows(decoding, now_s))
        is_blocked = self.num_preemptions > num_preemptions or self._admit(budget, online=True)
        scheduled += self._prefill(budget, scheduled, online=True)
        if self._has_background():
            self._narrow_for_background(budget, decoding, now_s)
            scheduled += self._decode(budget, online=False)
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
        """A step has computed tokens of this request."""
        self.blocks.publish(request)

    def _has_background(self) -> bool:
        """Both lists have the worst class last."""
        return any(
            requests and not requests[-1].is_online for requests in (self.running, self.waiting)
        )

    def _narrow_for_background(
        self, budget: StepBudget, decoding: list[EngineRequest], now_s: float
    ) -> None:
        """Leave what background rows may take beside the online ones of this step.

        A step without any online row is free for them, also while online requests wait: it is for their blocks.
        """
        prefilling = [r for r in self.running if is_online(r.klass) and not r.is_decoding]
        prefilling += [request for request in self.waiting if is_online(request.klass)]
        if budget.num_taken and (decoding or prefilling):
            num_rows = self.pace.background_rows(budget.num_taken, decoding, prefilling, now_s)
        else:
            num_rows = self.pace.idle_rows(sum(r.is_decoding for r in self.running))
        budget.narrow(num_rows)

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
                if not self.blocks.grow(request):
                    self._preempt(self.running[-1])  # never one before `index`: those are scheduled
                    continue
                budget.take(1)
                yield request
            index += 1

    def _grant(self, request: EngineRequest, budget: StepBudget) -> int:
        """Room for guesses: half of what the step has left, and blocks that nobody is waiting for."""
        num_guesses = min(request.drafts.num_wanted, budget.num_tokens // 2)
        num_guesses = self.blocks.grow_for_guesses(request, num_guesses, self._watermark)
        budget.take(num_guesses)
        request.drafts.num_granted = num_guesses
        del request.drafts.token_ids[num_guesses:]
        return num_guesses

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
            hits = self.blocks.lookup(request)
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
        self.blocks.take(request, hits)
        if request.num_preemptions == 0:
            request.num_cached_tokens = request.num_computed_tokens
        request.slot = self._free_slots.pop()
        request.status = Status.RUNNING
        insort(self.running, request, key=_run_rank)

    def _prefix_is_under_way(self, request: EngineRequest, index: int) -> bool:
        """Whether a running prefill of no worse class is about to publish this one's next block.

        Only running requests count, so nobody waits for one that was aborted or preempted.
        """
        return any(
            not other.is_decoding
            and other.served_as <= request.served_as
            and self.blocks.is_under_way(request, index, other)
            for other in self.running
        )

    def _fits(self, request: EngineRequest, hits: list[int]) -> bool:
        num_taken = self.blocks.num_taken(request, hits)
        return num_taken + self._reserve(request) <= self.pool.num_free

    def _reserve(self, request: EngineRequest) -> int:
        """Blocks that those already running may need soon; background work leaves one for each online row."""
        if not self.running:
            return 0
        if request.is_online:
            return self._watermark
        return self._watermark + sum(other.is_online for other in self.running)

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
        hits = self.blocks.lookup(first)
        if self._prefix_is_under_way(first, len(hits)) or not self._could_fit(first, hits):
            return
        while self.running and self.running[-1].served_as > first.served_as:
            if self._free_slots and self._fits(first, self.blocks.lookup(first)):
                return
            self._preempt(self.running[-1])

    def _could_fit(self, request: EngineRequest, hits: list[int]) -> bool:
        """Whether it fits once every running request of a worse class has given up its blocks."""
        if self._fits(request, hits):
            return True
        worse = [r for r in self.running if r.served_as > request.served_as]
        reserve = 0 if len(worse) == len(self.running) else self._reserve(request)
        num_free = self.pool.num_free + self.blocks.num_freed(worse, but=set(hits))
        return self.blocks.num_taken(request, hits) + reserve <= num_free

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
        self.blocks.release(request)
        self._free_slots.append(request.slot)


def _queue_rank(request: EngineRequest) -> tuple[RequestClass, bool, float, int]:
    return request.queue_rank


def _run_rank(request: EngineRequest) -> tuple[RequestClass, int]:
    return request.run_rank
