from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from backend.cpu.attention import Scoring, attend, plan_attention, write_cache

DIM = 8
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
Span = tuple[int, int]  # new rows, context with them


def reference(
    query: Tensor, keys: Tensor, values: Tensor, window: int | None, scoring: Scoring
) -> Tensor:
    """query [n, H, D], keys and values [L, KV, D]: the last n of L positions, causally, in float64."""
    group = query.shape[1] // keys.shape[1]
    q, k, v = (t.double().transpose(0, 1) for t in (query, keys, values))
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    scores = q @ k.transpose(1, 2) * (scoring.scale or DIM**-0.5)
    if scoring.softcap:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    row = torch.arange(keys.shape[0] - query.shape[0], keys.shape[0]).unsqueeze(1)
    column = torch.arange(keys.shape[0])
    hidden = column > row
    if window is not None:
        hidden |= column <= row - window
    return (scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v).transpose(0, 1).flatten(1)


PLAIN = Scoring()


def check(
    spans: list[Span],
    heads: tuple[int, int] = (6, 2),
    block_size: int = 4,
    dtype: torch.dtype = torch.float32,
    *,
    shuffled: bool = True,
    window: int | None = None,
    scoring: Scoring = PLAIN,
) -> None:
    """Run one paged step and compare every sequence with its reference.

    Blocks wholly behind the window are taken away: their entries lead to a block of NaN.
    """
    num_heads, kv_heads = heads
    num_blocks = sum(-(-context // block_size) for _, context in spans) + 2
    free = list(range(num_blocks))
    if shuffled:
        random.Random(len(spans)).shuffle(free)
    generator = torch.Generator().manual_seed(1)
    keys = torch.full((kv_heads, num_blocks, block_size, DIM), 99.0, dtype=dtype)
    values = keys.clone()
    gone = num_blocks - 1
    free.remove(gone)
    keys[:, gone] = values[:, gone] = float("nan")
    tables, queries, wanted, starts = [], [], [], [0]
    for rows, context in spans:
        table = [free.pop(0) for _ in range(-(-context // block_size))]
        slots = torch.tensor(
            [table[p // block_size] * block_size + p % block_size for p in range(context)]
        )
        q = torch.randn(rows, num_heads, DIM, generator=generator).to(dtype)
        k, v = (torch.randn(context, kv_heads, DIM, generator=generator).to(dtype) for _ in "kv")
        write_cache(keys, slots, k)
        write_cache(values, slots, v)
        if window is not None:
            behind = max(0, context - rows + 1 - window) // block_size
            table = [gone] * behind + table[behind:]
        tables.append(table)
        queries.append(q)
        wanted.append(reference(q, k, v, window, scoring))
        starts.append(starts[-1] + rows)
    widest = max(map(len, tables))
    padded = torch.tensor([t + [0] * (widest - len(t)) for t in tables], dtype=torch.int32)
    contexts = [context for _, context in spans]
    plan = plan_attention(starts, contexts, padded, block_size, dtype, window=window)
    out = attend(torch.cat(queries), keys, values, plan, scoring)
    assert out.dtype == dtype
    assert (out.double() - torch.cat(wanted)).abs().max() < TOLERANCE[dtype]


CASES: dict[str, list[Span]] = {
    "one decode": [(1, 9)],
    "one decode on its first token": [(1, 1)],
    "one decode at a block boundary": [(1, 8)],
    "decodes of equal length": [(1, 7)] * 3,
    "decodes of unlike lengths": [(1, 1), (1, 70), (1, 5), (1, 33), (1, 6)],
    "a first chunk": [(9, 9)],
    "a later chunk": [(3, 14)],
    "a chunk after a single token": [(5, 6)],
    "two chunks": [(4, 4), (5, 11)],
    "decodes around a chunk": [(1, 12), (6, 6), (1, 3), (2, 9), (1, 13)],
}


@pytest.mark.parametrize("shuffled", [False, True], ids=["consecutive", "scattered"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_a_paged_step_equals_plain_attention(name: str, dtype: torch.dtype, shuffled: bool) -> None:
    check(CASES[name], dtype=dtype, shuffled=shuffled)


@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (8, 1), (9, 3)], ids=str)
def test_any_number_of_heads_may_share_a_kv_head(heads: tuple[int, int]) -> None:
    check(CASES["decodes around a chunk"], heads)


@pytest.mark.parametrize("window", [1, 3, 4, 5, 8, 13, 40])
@pytest.mark.parametrize("name", CASES)
def test_a_window_hides_what_lies_behind_it(name: str, window: int) -> None:
    check(CASES[name], window=window)


@pytest.mark.parametrize("scoring", [Scoring(scale=0.9), Scoring(softcap=1.5), Scoring(0.7, 2.0)])
@pytest.mark.parametrize("window", [None, 5])
def test_scores_are_scaled_and_capped_before_they_are_hidden(
    window: int | None, scoring: Scoring
) -> None:
    for spans in CASES.values():
        check(spans, window=window, scoring=scoring)


spans = st.lists(
    st.tuples(st.integers(1, 6), st.integers(0, 40)).map(lambda t: (t[0], t[0] + t[1])),
    min_size=1,
    max_size=6,
)


@settings(max_examples=40, deadline=None)
@given(
    spans,
    st.sampled_from([1, 4, 16]),
    st.booleans(),
    st.sampled_from([None, 1, 2, 7, 16, 30]),
)
def test_any_mix_of_rows_contexts_and_windows_is_right(
    steps: list[Span], block_size: int, shuffled: bool, window: int | None
) -> None:
    check(steps, block_size=block_size, shuffled=shuffled, window=window)


def test_a_short_decode_does_not_gather_as_much_as_its_longest_neighbour() -> None:
    tables = torch.zeros(3, 64, dtype=torch.int32)
    plan = plan_attention([0, 1, 2, 3], [1024, 20, 30], tables, 16, torch.float32)
    assert sorted(group.blocks.num_tokens for group in plan.decodes) == [30, 1024]


def test_a_windowed_decode_reads_no_more_than_its_window_and_a_block() -> None:
    tables = torch.zeros(2, 64, dtype=torch.int32)
    plan = plan_attention([0, 1, 2], [1024, 20], tables, 16, torch.float32, window=40)
    assert sorted(group.blocks.num_tokens for group in plan.decodes) == [20, 48]


def test_a_sequence_without_rows_takes_no_part() -> None:
    plan = plan_attention([0, 0, 1], [5, 3], torch.zeros(2, 2, dtype=torch.int32), 4, torch.float32)
    assert [group.blocks.num_tokens for group in plan.decodes] == [3]
    assert plan.chunks == []
