"""Who owns which KV block, and which free blocks still hold a prefix worth finding.

Every block is in one of three states: owned (`ref_count > 0`), free and cached (its key is published, a
later request may still want it), or free and blank. Free blocks form a doubly linked list in the order in
which they will be reused; the links live in two flat lists, so a hit in the middle leaves it in O(1).
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import NamedTuple

_KEY_DOMAIN = b"tidegate-kv-block-v1"


class EngineCorrupt(RuntimeError):
    """The block accounting contradicts itself: going on could hand one request another's text."""


class BlockKey(NamedTuple):
    """What a full block holds: its own tokens behind everything that `parent` stands for."""

    digest: bytes
    parent: bytes
    tokens: bytes  # int32 token ids


def root_digest(fingerprint: str, cache_salt: bytes, block_size: int) -> bytes:
    """The parent of a first block. Each part is length-prefixed, so no two mixtures look alike."""
    root = blake2b(_KEY_DOMAIN, digest_size=32)
    for part in (fingerprint.encode(), cache_salt, block_size.to_bytes(4, "little")):
        root.update(len(part).to_bytes(8, "little") + part)
    return root.digest()


def extend_keys(
    keys: list[BlockKey], root: bytes, token_ids: Sequence[int], block_size: int
) -> None:
    """Append the keys of the full blocks of `token_ids` that `keys` does not cover yet."""
    for start in range(len(keys) * block_size, len(token_ids) - block_size + 1, block_size):
        parent = keys[-1].digest if keys else root
        tokens = array("i", token_ids[start : start + block_size]).tobytes()
        keys.append(BlockKey(blake2b(parent + tokens, digest_size=32).digest(), parent, tokens))


class BlockPool:
    """Fixed blocks with reference counts; `free` keeps published contents until the block is reused."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self.ref_counts = [0] * num_blocks
        self._keys: list[BlockKey | None] = [None] * num_blocks
        self._published: dict[bytes, int] = {}  # digest -> block id
        # The free list is a ring through one extra node, `self._end`: after it comes the block to reuse first.
        self._end = num_blocks
        self._next = [*range(1, num_blocks + 1), 0]
        self._prev = [num_blocks, *range(num_blocks)]

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Take blocks with undefined contents, or None (and nothing changed) if too few are free."""
        if num_blocks > self.num_free:
            return None
        blocks: list[int] = []
        for _ in range(num_blocks):
            block_id = self._next[self._end]
            self._unlink(block_id)
            self._forget(block_id)
            self.ref_counts[block_id] = 1
            blocks.append(block_id)
        return blocks

    def lookup(self, keys: Iterable[BlockKey]) -> list[int]:
        """The blocks that hold the longest published prefix of `keys`. Takes no reference."""
        blocks: list[int] = []
        for key in keys:
            block_id = self._published.get(key.digest)
            if block_id is None or self._keys[block_id] != key:
                break
            blocks.append(block_id)
        return blocks

    def num_unowned(self, blocks: Iterable[int]) -> int:
        """How many of these blocks `acquire` would take out of the free list."""
        return sum(self.ref_counts[block_id] == 0 for block_id in blocks)

    def acquire(self, blocks: Iterable[int]) -> None:
        """Become one more owner of blocks that `lookup` found."""
        for block_id in blocks:
            if self.ref_counts[block_id] == 0:
                self._unlink(block_id)
            self.ref_counts[block_id] += 1

    def free(self, block_table: Sequence[int]) -> None:
        """Give up one reference to each block of a sequence."""
        for block_id in reversed(block_table):  # tail first: prefixes are shared from the front
            self.ref_counts[block_id] -= 1
            if self.ref_counts[block_id] == 0:
                self._link(block_id, before_all=self._keys[block_id] is None)

    def publish(self, block_id: int, key: BlockKey) -> None:
        """Let others find this block. Only for contents that a finished step has written.

        A second block with the same contents stays private; its owner keeps it until it is freed.
        """
        if key.digest not in self._published:
            self._published[key.digest] = block_id
            self._keys[block_id] = key

    def unpublish(self, blocks: Iterable[int]) -> None:
        """Stop offering contents that turned out to be bad."""
        for block_id in blocks:
            self._forget(block_id)

    def check_integrity(self, block_tables: Iterable[Sequence[int]]) -> None:
        """Raise EngineCorrupt unless these tables explain every reference and all else is free."""
        owned = Counter(block_id for table in block_tables for block_id in table)
        for block_id, ref_count in enumerate(self.ref_counts):
            if ref_count != owned[block_id]:
                raise EngineCorrupt(
                    f"block {block_id} counts {ref_count} references and has {owned[block_id]} owners"
                )
        free = self._walk_free_list()
        if len(free) != self.num_free or len(free) + len(owned) != self.num_blocks:
            raise EngineCorrupt(
                f"{len(free)} blocks in the free list, {self.num_free} counted free and "
                f"{len(owned)} owned, of {self.num_blocks}"
            )
        if free & owned.keys():
            raise EngineCorrupt(f"blocks both free and owned: {sorted(free & owned.keys())}")

    def _walk_free_list(self) -> set[int]:
        seen: set[int] = set()
        block_id = self._next[self._end]
        while block_id != self._end and block_id not in seen:
            seen.add(block_id)
            block_id = self._next[block_id]
        return seen

    def _forget(self, block_id: int) -> None:
        key = self._keys[block_id]
        if key is not None:
            del self._published[key.digest]
            self._keys[block_id] = None

    def _unlink(self, block_id: int) -> None:
        before, after = self._prev[block_id], self._next[block_id]
        self._next[before], self._prev[after] = after, before
        self.num_free -= 1

    def _link(self, block_id: int, *, before_all: bool) -> None:
        after = self._next[self._end] if before_all else self._end
        before = self._prev[after]
        self._next[before] = self._prev[after] = block_id
        self._prev[block_id], self._next[block_id] = before, after
        self.num_free += 1
