from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.engine.block_pool import BlockKey, BlockPool, EngineCorrupt, extend_keys, root_digest

ROOT = root_digest("model", b"", 4)


def keys_of(token_ids: list[int], root: bytes = ROOT) -> list[BlockKey]:
    keys: list[BlockKey] = []
    extend_keys(keys, root, token_ids, 4)
    return keys


def published(pool: BlockPool, token_ids: list[int]) -> list[int]:
    """Allocate, publish and free the full blocks of a sequence."""
    keys = keys_of(token_ids)
    blocks = pool.allocate(len(keys))
    assert blocks is not None
    for block_id, key in zip(blocks, keys, strict=True):
        pool.publish(block_id, key)
    pool.free(blocks)
    return blocks


def test_fresh_blocks_come_in_order():
    pool = BlockPool(4)
    assert pool.allocate(3) == [0, 1, 2]
    assert pool.num_free == 1


def test_too_large_an_allocation_changes_nothing():
    pool = BlockPool(4)
    assert pool.allocate(5) is None
    assert pool.num_free == 4
    assert pool.allocate(4) == [0, 1, 2, 3]


def test_blank_blocks_are_reused_before_cached_ones():
    pool = BlockPool(4)
    published(pool, list(range(8)))  # blocks 0, 1
    blank = pool.allocate(1)
    assert blank == [2]
    pool.free(blank)
    assert pool.allocate(2) == [2, 3]


def test_the_tail_of_a_freed_sequence_is_evicted_first():
    pool = BlockPool(3)
    assert published(pool, list(range(12))) == [0, 1, 2]
    assert pool.allocate(1) == [2]
    assert pool.lookup(keys_of(list(range(12)))) == [0, 1]


def test_the_least_recently_freed_sequence_is_evicted_first():
    pool = BlockPool(2)
    old, new = published(pool, [1] * 4), published(pool, [2] * 4)
    pool.acquire(old)
    pool.free(old)  # used again, so `new` is the older one now
    assert pool.allocate(1) == new


def test_a_hit_in_the_middle_of_the_free_list_leaves_its_neighbours_in_order():
    pool = BlockPool(3)
    first, middle, last = (published(pool, [n] * 4)[0] for n in (1, 2, 3))
    pool.acquire([middle])
    assert pool.allocate(2) == [first, last]
    pool.check_integrity([[middle], [first, last]])


def test_a_shared_block_is_freed_by_its_last_owner():
    pool = BlockPool(2)
    (block_id,) = published(pool, [7] * 4)
    pool.acquire([block_id])
    pool.acquire([block_id])
    pool.free([block_id])
    assert pool.num_free == 1
    pool.free([block_id])
    assert pool.num_free == 2


def test_lookup_stops_at_the_first_block_that_differs():
    pool = BlockPool(4)
    blocks = published(pool, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12])
    assert pool.lookup(keys_of([1, 2, 3, 4, 5, 6, 7, 0, 9, 10, 11, 12])) == blocks[:1]


def test_a_block_is_found_only_behind_the_same_prefix():
    pool = BlockPool(4)
    published(pool, [1] * 4 + [2] * 4)
    assert pool.lookup(keys_of([2] * 4)) == []


@pytest.mark.parametrize(
    "root",
    [
        root_digest("model", b"tenant", 4),
        root_digest("other model", b"", 4),
        root_digest("model", b"", 8),
        root_digest("mode", b"l", 4),
    ],
    ids=["salt", "fingerprint", "block size", "moved border"],
)
def test_another_root_never_shares_blocks(root: bytes):
    pool = BlockPool(4)
    published(pool, [1] * 4)
    assert pool.lookup(keys_of([1] * 4, root)) == []


def test_a_colliding_digest_is_not_a_hit():
    pool = BlockPool(4)
    published(pool, [1] * 4)
    (key,) = keys_of([1] * 4)
    assert pool.lookup([key]) != []
    assert pool.lookup([key._replace(tokens=b"other tokens")]) == []
    assert pool.lookup([key._replace(parent=b"other parent")]) == []


def test_a_reused_block_is_no_longer_found():
    pool = BlockPool(1)
    published(pool, [1] * 4)
    pool.allocate(1)
    assert pool.lookup(keys_of([1] * 4)) == []


def test_unpublished_contents_are_no_longer_found():
    pool = BlockPool(2)
    blocks = published(pool, [1] * 4)
    pool.unpublish(blocks)
    assert pool.lookup(keys_of([1] * 4)) == []


def test_a_second_block_with_the_same_contents_leaves_the_first_in_place():
    pool = BlockPool(4)
    first, second = published(pool, [1] * 4), pool.allocate(1)
    assert second is not None
    pool.publish(second[0], keys_of([1] * 4)[0])
    pool.free(second)
    assert pool.lookup(keys_of([1] * 4)) == first
    pool.check_integrity([])


def test_keys_grow_by_whole_blocks_only():
    keys = keys_of([1, 2, 3])
    assert keys == []
    extend_keys(keys, ROOT, [1, 2, 3, 4, 5, 6, 7, 8, 9], 4)
    assert keys == keys_of([1, 2, 3, 4, 5, 6, 7, 8])


def test_integrity_finds_a_lost_block():
    pool = BlockPool(4)
    pool.allocate(1)
    with pytest.raises(EngineCorrupt, match="block 0 counts 1 references and has 0 owners"):
        pool.check_integrity([])


def test_integrity_finds_a_block_freed_twice():
    pool = BlockPool(4)
    blocks = pool.allocate(1)
    assert blocks is not None
    pool.free(blocks)
    pool.free(blocks)
    with pytest.raises(EngineCorrupt):
        pool.check_integrity([])


def test_integrity_finds_a_broken_free_list():
    pool = BlockPool(4)
    pool.num_free = 3
    with pytest.raises(EngineCorrupt, match="4 blocks in the free list, 3 counted free"):
        pool.check_integrity([])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), max_size=40))
def test_any_history_of_owners_keeps_the_books_balanced(history: list[tuple[int, int]]):
    pool, tables = BlockPool(6), dict[int, list[int]]()
    for owner, num_blocks in history:
        if owner in tables:
            pool.free(tables.pop(owner))
        keys = keys_of([owner % 2] * 4 * num_blocks)  # owners 0 and 2 share, 1 and 3 too
        hits = pool.lookup(keys)
        if num_blocks - len(hits) + pool.num_unowned(hits) > pool.num_free:
            continue
        pool.acquire(hits)
        tables[owner] = hits + (pool.allocate(num_blocks - len(hits)) or [])
        for block_id, key in zip(tables[owner], keys, strict=True):
            pool.publish(block_id, key)
        pool.check_integrity(tables.values())
