"""A scheduler whose steps cost virtual seconds and whose requests each get one known token from a finished row."""

from __future__ import annotations

from typing import Any

from backend.engine.block_pool import BlockPool, root_digest
from backend.engine.config import EngineConfig
from backend.engine.detokenizer import Detokenizer
from backend.engine.params import Objective, RequestClass, SamplingParams
from backend.engine.request import EngineRequest, Status
from backend.engine.scheduler import Scheduler

BLOCK = 4


class Steps:
    """`base_s` and `row_s`: what a step takes, and each row of it. With the defaults no time passes."""

    def __init__(
        self,
        num_blocks: int = 64,
        *,
        base_s: float = 0.0,
        row_s: float = 0.0,
        window: int | None = None,
        **config: Any,
    ) -> None:
        self.pool = BlockPool(num_blocks)
        self.scheduler = Scheduler(EngineConfig(block_size=BLOCK, **config), self.pool, window)
        self.now_s = 0.0
        self.token_times_s: dict[str, list[float]] = {}
        self._base_s, self._row_s = base_s, row_s
        self._num_arrivals = 0

    def add(
        self,
        name: str,
        prompt: int | list[int],
        klass: RequestClass = RequestClass.STANDARD,
        *,
        max_tokens: int = 1000,
        ttft_ms: float | None = None,
        tpot_ms: float | None = None,
    ) -> EngineRequest:
        """`prompt`: token ids, or how many (then unlike anybody else's)."""
        self._num_arrivals += 1
        ids = (
            [10_000 * self._num_arrivals + i for i in range(prompt)]
            if isinstance(prompt, int)
            else list(prompt)
        )
        request = EngineRequest(
            request_id=name,
            params=SamplingParams(),
            klass=klass,
            arrival=self._num_arrivals,
            arrival_s=self.now_s,
            token_ids=ids,
            num_prompt_tokens=len(ids),
            max_output_tokens=max_tokens,
            seed=0,
            root=root_digest("m", b"", BLOCK),
            detokenizer=Detokenizer(),
            rules=None,
            objective=Objective(ttft_ms, tpot_ms),
        )
        self.token_times_s[name] = []
        self.scheduler.add(request)
        return request

    def step(self) -> dict[str, int]:
        """-> tokens computed, by request."""
        scheduled = self.scheduler.schedule(self.now_s)
        num_rows = sum(num_tokens for _, num_tokens in scheduled)
        seconds = self._base_s + num_rows * self._row_s
        self.now_s += seconds
        self.scheduler.record_step(num_rows, seconds)
        for request, num_tokens in scheduled:
            request.num_computed_tokens += num_tokens
            self.scheduler.publish(request)
            if request.num_wanted_tokens == 0:
                self._append(request)
        self.pool.check_integrity(request.block_table for request in self.scheduler.running)
        return {request.request_id: num_tokens for request, num_tokens in scheduled}

    def run_until(self, request: EngineRequest, *, max_steps: int = 5000) -> int:
        """Step until it has ended -> how many steps that took."""
        for count in range(max_steps):
            if request.status is Status.FINISHED:
                return count
            self.step()
        raise AssertionError(f"{request.request_id} did not end within {max_steps} steps")

    def _append(self, request: EngineRequest) -> None:
        if request.first_token_s is None:
            request.first_token_s = self.now_s
        self.token_times_s[request.request_id].append(self.now_s)
        request.append(7)
        if request.num_output_tokens == request.max_output_tokens:
            self.scheduler.finish(request)
