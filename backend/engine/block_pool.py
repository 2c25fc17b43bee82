"""Who owns which KV block, and which free blocks still hold a prefix worth finding.

Every block is in one of three states: owned (`ref_count > 0`), free and cached (its key is published, a
later request may still want it), or free and blank. Free blocks form two doubly linked lists, each in the order in
which its blocks will be reused; the links live in flat lists, so a hit in the middle leaves in O(1).

One list holds what only background work (flex, batch) has used, the other what anybody waits for. A block of the
first counts as unused for one whole pool of freed blocks longer than it is: background work cannot flush the prefixes
of online work, and prefixes that nobody asks for any more do not crowd out background work for ever.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import NamedTuple

NULL_BLOCK = -1  # in a block table: tokens behind the sliding window, whose block was given back
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
        self.num_evictions = 0  # blocks whose cached contents were given up
        self.ref_counts = [0] * num_blocks
        self._keys: list[BlockKey | None] = [None] * num_blocks
        self._published: dict[bytes, int] = {}  # digest -> block id
        self._num_frees = 0
        self._freed_at = [0] * num_blocks  # in frees of blocks
        self._is_online = [False] * num_blocks  # online work has used its cached contents
        # Each free list is a ring through an extra node: after it comes the block to reuse first.
        self._background, self._online = num_blocks, num_blocks + 1
        self._next = [*range(1, num_blocks + 1), 0, self._online]
        self._prev = [num_blocks, *range(num_blocks), self._online]

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Take blocks with undefined contents, or None (and nothing changed) if too few are free."""
        if num_blocks > self.num_free:
            return None
        blocks: list[int] = []
        for _ in range(num_blocks):
            block_id = self._least_wanted()
            self._unlink(block_id)
            self.num_evictions += self._keys[block_id] is not None
            self._forget(block_id)
            self.ref_counts[block_id] = 1
            blocks.append(block_id)
        return blocks

    def lookup(self, keys: Sequence[BlockKey], num_needed: int | None = None) -> list[int]:
        """The blocks that hold the longest published prefix of `keys`. Takes no reference.

        Behind a sliding window only the last `num_needed` blocks of a prefix matter: NULL_BLOCK stands for the others.
        """
        if num_needed is not None:
            return self._lookup_tail(keys, num_needed)
        blocks: list[int] = []
        for key in keys:
            block_id = self._find(key)
            if block_id is None:
                break
            blocks.append(block_id)
        return blocks

    def num_unowned(self, blocks: Iterable[int]) -> int:
        """How many of these blocks `acquire` would take out of the free lists."""
        return sum(block != NULL_BLOCK and self.ref_counts[block] == 0 for block in blocks)

    def owned_once(self, block_table: Iterable[int]) -> list[int]:
        """Those of a sequence's blocks that nobody shares with it."""
        return [
            block for block in block_table if block != NULL_BLOCK and self.ref_counts[block] == 1
        ]

    def acquire(self, blocks: Iterable[int]) -> None:
        """Become one more owner of blocks that `lookup` found."""
        for block_id in blocks:
            if block_id == NULL_BLOCK:
                continue
            if self.ref_counts[block_id] == 0:
                self._unlink(block_id)
            self.ref_counts[block_id] += 1

    def free(self, block_table: Sequence[int], *, online: bool = True) -> None:
        """Give up one reference to each block of a sequence. `online`: of a class that somebody waits for."""
        for block_id in reversed(block_table):  # tail first: prefixes are shared from the front
            if block_id == NULL_BLOCK:
                continue
            self._is_online[block_id] |= online
            self.ref_counts[block_id] -= 1
            if self.ref_counts[block_id] == 0:
                self._link(block_id)

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
            if block_id != NULL_BLOCK:
                self._forget(block_id)

    def check_integrity(self, block_tables: Iterable[Sequence[int]]) -> None:
        """Raise EngineCorrupt unless these tables explain every reference and all else is free."""
        owned = Counter(block_id for table in block_tables for block_id in table)
        del owned[NULL_BLOCK]
        for block_id, ref_count in enumerate(self.ref_counts):
            if ref_count != owned[block_id]:
                raise EngineCorrupt(
                    f"block {block_id} counts {ref_count} references and has {owned[block_id]} owners"
                )
        free = self._walk(self._background) | self._walk(self._online)
        if len(free) != self.num_free or len(free) + len(owned) != self.num_blocks:
            raise EngineCorrupt(
                f"{len(free)} blocks in the free list, {self.num_free} counted free and "
                f"{len(owned)} owned, of {self.num_blocks}"
            )
        if free & owned.keys():
            raise EngineCorrupt(f"blocks both free and owned: {sorted(free & owned.keys())}")

    def _find(self, key: BlockKey) -> int | None:
        block_id = self._published.get(key.digest)
        return block_id if block_id is not None and self._keys[block_id] == key else None

    def _lookup_tail(self, keys: Sequence[BlockKey], num_needed: int) -> list[int]:
        """From the back: the last run of `num_needed` published blocks, or a shorter one that begins at the front."""
        run: list[int] = []
        for index in reversed(range(len(keys))):
            block_id = self._find(keys[index])
            if block_id is None:
                run = []
                continue
            run.append(block_id)
            if len(run) >= num_needed:
                return [NULL_BLOCK] * index + run[::-1]
        return run[::-1]

    def _least_wanted(self) -> int:
        background, online = self._next[self._background], self._next[self._online]
        if online == self._online:
            return background
        if background == self._background:
            return online
        if self._keys[background] is None:
            return background
        handicap = self.num_blocks
        return (
            background
            if self._freed_at[background] - handicap <= self._freed_at[online]
            else online
        )

    def _walk(self, end: int) -> set[int]:
        seen: set[int] = set()
        block_id = self._next[end]
        while block_id != end and block_id not in seen:
            seen.add(block_id)
            block_id = self._next[block_id]
        return seen

    def _forget(self, block_id: int) -> None:
        key = self._keys[block_id]
        self._is_online[block_id] = False
        if key is not None:
            del self._published[key.digest]
            self._keys[block_id] = None

    def _unlink(self, block_id: int) -> None:
        before, after = self._prev[block_id], self._next[block_id]
        self._next[before], self._prev[after] = after, before
        self.num_free -= 1

    def _link(self, block_id: int) -> None:
        """Into the list of its kind: cached contents at the back, a blank block before all others."""
        self._num_frees += 1
        self._freed_at[block_id] = self._num_frees
        if self._keys[block_id] is None:
            before, after = self._background, self._next[self._background]
        else:
            after = self._online if self._is_online[block_id] else self._background
            before = self._prev[after]
        self._next[before] = self._prev[after] = block_id
        self._prev[block_id], self._next[block_id] = before, after
        self.num_free += 1
