"""A small model guesses for a large one. It keeps its own keys and values in blocks of the same numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from backend.engine.config import EngineConfig
from backend.engine.request import EngineRequest, Rows
from backend.engine.runner import ModelRunner
from backend.engine.sampler import Sampler
from backend.models.batch import Model, cdiv


class DraftModel:
    """Draws with the noise that the large model will draw with (or keeps its law), so alike laws guess alike.

    A request's prompt is computed when it begins to decode, a chunk a step; until then it has no guesses.
    """

    def __init__(
        self,
        model: Model,
        config: EngineConfig,
        sampler: Sampler,
        num_blocks: int,
        block_rows: np.ndarray,
    ) -> None:
        self._runner = ModelRunner(model, num_blocks, config.block_size, block_rows)
        self._sampler = sampler
        self._block_size = config.block_size
        self._max_rows = config.max_num_batched_tokens
        self._vocab_size = sampler.vocab_size
        # By block: the digest of the tokens whose keys and values are in it. Blocks outlive their requests.
        self._held: list[bytes | None] = [None] * num_blocks

    def plan(self, request: EngineRequest, limit: int) -> int:
        return limit

    def propose(self, requests: Sequence[EngineRequest]) -> None:
        """One guess for each request that has caught up, then the next for each that is granted more."""
        ready = self._catch_up(requests)
        for k in range(1, max(request.drafts.num_granted for request in requests)):
            ready = [r for r in ready if k == len(r.drafts.token_ids) < r.drafts.num_granted]
            self._run(
                [Rows(r, r.drafts.num_computed_tokens, r.drafts.token_ids[-1:], 1) for r in ready]
            )

    def forget(self, request: EngineRequest) -> None:
        """Nothing: what is held belongs to blocks."""

    def _catch_up(self, requests: Sequence[EngineRequest]) -> list[EngineRequest]:
        """Compute tokens that came since the last guesses -> the requests that have none left."""
        rows: list[Rows] = []
        budget = self._max_rows
        for request in requests:
            start = self._known(request)
            token_ids = request.token_ids[start : start + budget]
            budget -= len(token_ids)
            if token_ids:
                is_last = start + len(token_ids) == request.num_tokens
                rows.append(Rows(request, start, token_ids, int(is_last)))
        self._run(rows)
        return [item.request for item in rows if item.num_logits]

    def _run(self, rows: list[Rows]) -> None:
        if not rows:
            return
        for request, start, token_ids, *_ in rows:
            for block_id in request.block_table[
                start // self._block_size : cdiv(start + len(token_ids), self._block_size)
            ]:
                self._held[block_id] = None
        logits = iter(self._runner.run(rows).logits[:, : self._vocab_size])
        for request, start, token_ids, num_logits, _ in rows:
            request.drafts.num_computed_tokens = start + len(token_ids)
            if num_logits:
                self._sampler.guess(next(logits), request)

    def _known(self, request: EngineRequest) -> int:
        """How many tokens at the front are computed. Marks and finds blocks on the way; one token is always left."""
        drafts, size = request.drafts, self._block_size
        request.extend_keys(size)
        known = min(drafts.num_computed_tokens, request.num_tokens - 1)
        for index in range(drafts.num_held_blocks, (request.num_tokens - 1) // size):
            block_id, digest = request.block_table[index], request.block_keys[index].digest
            if (index + 1) * size <= known:
                self._held[block_id] = digest
            elif known == index * size and self._held[block_id] == digest:
                known += size
            else:
                break
            drafts.num_held_blocks = index + 1
        return known
