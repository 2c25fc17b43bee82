from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.engine.block_pool import (
    NULL_BLOCK,
    BlockKey,
    BlockPool,
    EngineCorrupt,
    extend_keys,
    root_digest,
)

ROOT = root_digest("model", b"", 4)


def keys_of(token_ids: list[int], root: bytes = ROOT) -> list[BlockKey]:
    keys: list[BlockKey] = []
    extend_keys(keys, root, token_ids, 4)
    return keys


def published(pool: BlockPool, token_ids: list[int], *, online: bool = True) -> list[int]:
    """Allocate, publish and free the full blocks of a sequence."""
    keys = keys_of(token_ids)
    blocks = pool.allocate(len(keys))
    assert blocks is not None
    for block_id, key in zip(blocks, keys, strict=True):
        pool.publish(block_id, key)
    pool.free(blocks, online=online)
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


def test_what_background_work_left_is_evicted_before_older_online_prefixes():
    pool = BlockPool(4)
    published(pool, [1] * 8)
    background = published(pool, [2] * 8, online=False)
    assert pool.allocate(2) == background[::-1]


def test_an_online_prefix_unused_for_a_whole_pool_of_frees_goes_first():
    pool = BlockPool(4)
    online = published(pool, [1] * 4)
    for token in range(2, 7):
        background = published(pool, [token] * 12, online=False)
    assert pool.lookup(keys_of([1] * 4)) == []
    assert online[0] in background


def test_a_block_that_online_work_has_used_stays_one_when_background_work_frees_it():
    pool = BlockPool(3)
    shared = published(pool, [1] * 4)
    pool.acquire(shared)
    pool.free(shared, online=False)
    newer = published(pool, [2] * 4, online=False)
    assert pool.allocate(2) == [2, *newer]


def test_a_reused_block_forgets_that_online_work_has_used_it():
    pool = BlockPool(2)
    published(pool, [1] * 8)
    mine = published(pool, [2] * 4, online=False)
    assert pool.allocate(1) == mine


def test_evictions_are_counted_and_blank_blocks_are_none():
    pool = BlockPool(4)
    published(pool, [1] * 8)
    pool.allocate(3)
    assert pool.num_evictions == 1


# Sliding windows


def test_behind_a_window_a_prefix_is_found_by_its_tail_alone():
    pool = BlockPool(8)
    blocks = published(pool, list(range(16)))
    pool.unpublish(blocks[:2])
    assert pool.lookup(keys_of(list(range(16)))) == []
    found = pool.lookup(keys_of(list(range(16))), num_needed=2)
    assert found == [NULL_BLOCK, NULL_BLOCK, *blocks[2:]]


def test_behind_a_window_a_gap_cuts_the_prefix_to_what_lies_before_it():
    pool = BlockPool(8)
    blocks = published(pool, list(range(20)))
    pool.unpublish([blocks[3]])
    found = pool.lookup(keys_of(list(range(20))), num_needed=2)
    assert found == [NULL_BLOCK, *blocks[1:3]]


def test_behind_a_window_a_short_prefix_is_found_from_the_front():
    pool = BlockPool(8)
    blocks = published(pool, list(range(8)))
    assert pool.lookup(keys_of(list(range(12))), num_needed=3) == blocks


def test_null_blocks_are_nobodys():
    pool = BlockPool(2)
    blocks = pool.allocate(2)
    assert blocks is not None
    table = [NULL_BLOCK, *blocks]
    pool.acquire([NULL_BLOCK])
    pool.unpublish(table)
    assert (pool.num_unowned(table), pool.owned_once(table)) == (0, blocks)
    pool.check_integrity([table])
    pool.free(table)
    assert pool.num_free == 2
    pool.check_integrity([])


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
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.booleans()), max_size=40))
def test_any_history_of_owners_keeps_the_books_balanced(history: list[tuple[int, int, bool]]):
    pool, tables = BlockPool(6), dict[int, list[int]]()
    for owner, num_blocks, online in history:
        if owner in tables:
            pool.free(tables.pop(owner), online=online)
        keys = keys_of([owner % 2] * 4 * num_blocks)  # owners 0 and 2 share, 1 and 3 too
        hits = pool.lookup(keys)
        if num_blocks - len(hits) + pool.num_unowned(hits) > pool.num_free:
            continue
        pool.acquire(hits)
        tables[owner] = hits + (pool.allocate(num_blocks - len(hits)) or [])
        for block_id, key in zip(tables[owner], keys, strict=True):
            pool.publish(block_id, key)
        pool.check_integrity(tables.values())
