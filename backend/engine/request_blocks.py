"""A request's side of the block pool: what it finds there, takes, offers to others and gives back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from backend.engine.block_pool import NULL_BLOCK, BlockPool
from backend.engine.config import EngineConfig
from backend.engine.request import EngineRequest
from backend.engine.urgency import is_online
from backend.models.batch import cdiv


class RequestBlocks:
    """Keeps every `block_table` and the counts that belong to it."""

    def __init__(self, config: EngineConfig, pool: BlockPool, window: int | None) -> None:
        self.pool = pool
        self._block_size = config.block_size
        self._use_prefix_cache = config.enable_prefix_cache
        self._window = window
        self._num_window_blocks = (
            None if window is None else max(1, cdiv(window - 1, config.block_size))
        )

    def lookup(self, request: EngineRequest) -> list[int]:
        """Cached blocks at its front; at least its last token is left to compute, or there were no logits."""
        if self._use_prefix_cache:  # output since it was queued, if it was preempted
            request.extend_keys(self._block_size)
        keys = request.block_keys[: request.max_cached_tokens // self._block_size]
        return self.pool.lookup(keys, self._num_window_blocks)

    def num_taken(self, request: EngineRequest, hits: list[int]) -> int:
        """Free blocks that it would take to compute all its tokens, those of its hits included."""
        num_blocks = cdiv(request.num_tokens, self._block_size)
        return num_blocks - len(hits) + self.pool.num_unowned(hits)

    def num_freed(self, requests: Iterable[EngineRequest], but: set[int]) -> int:
        """Blocks that come free when all of these give theirs back, `but` those left out."""
        owners = Counter(block for request in requests for block in request.block_table)
        del owners[NULL_BLOCK]
        return sum(
            self.pool.ref_counts[block] == num_owners and block not in but
            for block, num_owners in owners.items()
        )

    def take(self, request: EngineRequest, hits: list[int]) -> None:
        """The blocks of its whole prefill, hits included. The caller has counted them with `num_taken`."""
        self.pool.acquire(hits)
        new_blocks = self.pool.allocate(cdiv(request.num_tokens, self._block_size) - len(hits))
        assert new_blocks is not None
        request.block_table = hits + new_blocks
        request.num_computed_tokens = len(hits) * self._block_size
        request.num_published_blocks = len(hits)
        request.num_hidden_blocks = hits.count(NULL_BLOCK)

    def grow(self, request: EngineRequest) -> bool:
        """A block for its last token, where that needs one -> False: there is none."""
        if self._num_slots(request) >= request.num_tokens:
            return True
        blocks = self.pool.allocate(1)
        request.block_table += blocks or []
        return blocks is not None

    def grow_for_guesses(self, request: EngineRequest, num_guesses: int, spare: int) -> int:
        """Blocks behind its last token, as long as `spare` ones stay free -> for how many guesses there is room."""
        wanted = cdiv(request.num_tokens + num_guesses, self._block_size)
        num_missing = wanted - len(request.block_table)
        if num_missing > 0 and num_missing + spare <= self.pool.num_free:
            request.block_table += self.pool.allocate(num_missing) or []
        return min(num_guesses, self._num_slots(request) - request.num_tokens)

    def _num_slots(self, request: EngineRequest) -> int:
        return len(request.block_table) * self._block_size

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

    def release(self, request: EngineRequest) -> None:
        self.pool.free(request.block_table, online=is_online(request.klass))
        request.block_table = []
        request.drafts.release()
        request.num_computed_tokens = request.num_published_blocks = 0
        request.num_mirrored_blocks = request.num_hidden_blocks = 0

    def is_under_way(self, request: EngineRequest, index: int, other: EngineRequest) -> bool:
        """Whether `other`, a running prefill, is about to publish block `index` of this request."""
        if not self._use_prefix_cache or index >= len(other.block_keys):
            return False
        return (
            index < request.max_cached_tokens // self._block_size
            and other.num_computed_tokens < (index + 1) * self._block_size
            and other.block_keys[index].digest == request.block_keys[index].digest
        )

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
