"""Paged attention on the CPU by plain torch: gather a sequence's blocks, then scaled dot product.

The query heads that share one KV head are folded into the query axis, so a decode step asks the kernel for `group`
rows instead of one: with a single row its bfloat16 path is five times slower. All that depends on the step and not
on the layer (block indices, masks) is worked out once in `plan_attention`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from backend.quant.kv import Int8Cache, KVTensor, dequantize_rows, quantize_rows


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Where the cached tokens of one or more sequences lie: consecutive blocks (a view) or an index (a copy)."""

    num_seqs: int
    num_tokens: int  # for each sequence, padding included
    first: int  # of consecutive blocks; used when index is None
    index: Tensor | None  # [num_seqs * blocks_per_seq] int64

    def read(self, cache: KVTensor, dtype: torch.dtype) -> Tensor:
        """cache [KV, num_blocks, block_size, D] -> [KV, num_seqs, num_tokens, D] in `dtype`."""
        if isinstance(cache, Int8Cache):
            scales = self._gather(cache.scales.unsqueeze(-1))
            return dequantize_rows(self._gather(cache.codes), scales, dtype)
        return self._gather(cache).to(dtype)

    def _gather(self, cache: Tensor) -> Tensor:
        kv_heads, _, block_size, dim = cache.shape
        if self.index is None:
            flat = cache.view(kv_heads, 1, -1, dim)
            start = self.first * block_size
            return flat[:, :, start : start + self.num_tokens]
        gathered = cache.index_select(1, self.index).view(kv_heads, self.num_seqs, -1, dim)
        return gathered[:, :, : self.num_tokens]


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """Sequences with one new row each and contexts of about the same length."""

    rows: Tensor | None  # [num_seqs] int64; None: all rows of the step, in order
    blocks: _Blocks
    mask: Tensor | None  # additive [1, num_seqs, 1, num_tokens]; None: nothing is padding


@dataclass(frozen=True, slots=True)
class _PrefillChunk:
    """One sequence with several new rows, `start` to `end`, after `num_tokens - rows` cached ones."""

    start: int
    end: int
    blocks: _Blocks
    mask: Tensor | None  # additive [rows, num_tokens]; None: no earlier context, plain causal


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """How one step attends; the same for every layer."""

    decodes: list[_DecodeGroup]
    chunks: list[_PrefillChunk]


@dataclass(frozen=True, slots=True)
class _Step:
    query_start: Sequence[int]
    context_lens: Sequence[int]
    tables: list[list[int]]
    block_size: int
    dtype: torch.dtype  # of the queries


def plan_attention(
    query_start: Sequence[int],
    context_lens: Sequence[int],
    block_tables: Tensor,
    block_size: int,
    dtype: torch.dtype,
) -> AttentionPlan:
    """Lay out a step; the arguments are those of `Batch`, `dtype` is that of the queries.

    Single-row sequences are grouped by context length to the next power of two, so padding at most doubles a read.
    """
    step = _Step(query_start, context_lens, block_tables.tolist(), block_size, dtype)
    groups: defaultdict[int, list[int]] = defaultdict(list)
    chunks: list[_PrefillChunk] = []
    for seq, context in enumerate(context_lens):
        rows = query_start[seq + 1] - query_start[seq]
        if rows == 1:
            groups[(-(-context // block_size) - 1).bit_length()].append(seq)
        elif rows > 1:
            chunks.append(_prefill_chunk(seq, step))
    return AttentionPlan([_decode_group(seqs, step) for seqs in groups.values()], chunks)


def _prefill_chunk(seq: int, step: _Step) -> _PrefillChunk:
    start, end, context = step.query_start[seq], step.query_start[seq + 1], step.context_lens[seq]
    return _PrefillChunk(
        start, end, _one_sequence(seq, step), _causal(end - start, context, step.dtype)
    )


def _decode_group(seqs: list[int], step: _Step) -> _DecodeGroup:
    every_row = len(seqs) == step.query_start[-1]
    rows = None if every_row else torch.tensor([step.query_start[s] for s in seqs])
    if len(seqs) == 1:
        return _DecodeGroup(rows, _one_sequence(seqs[0], step), None)
    lens = [step.context_lens[s] for s in seqs]
    longest = max(lens)
    num_blocks = -(-longest // step.block_size)
    index = torch.tensor([step.tables[s][:num_blocks] for s in seqs]).view(-1)
    blocks = _Blocks(len(seqs), longest, 0, index)
    if min(lens) == longest:
        return _DecodeGroup(rows, blocks, None)
    beyond = torch.arange(longest) >= torch.tensor(lens).unsqueeze(1)
    return _DecodeGroup(rows, blocks, _additive(beyond, step.dtype).view(1, len(seqs), 1, longest))


def _one_sequence(seq: int, step: _Step) -> _Blocks:
    context = step.context_lens[seq]
    used = step.tables[seq][: -(-context // step.block_size)]
    consecutive = used == list(range(used[0], used[0] + len(used)))
    return _Blocks(1, context, used[0], None if consecutive else torch.tensor(used))


def _causal(rows: int, context: int, dtype: torch.dtype) -> Tensor | None:
    if rows == context:
        return None
    return _additive(torch.ones(rows, context, dtype=torch.bool).triu_(context - rows + 1), dtype)


def _additive(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))


def write_cache(cache: KVTensor, slots: Tensor, rows: Tensor) -> None:
    """Put rows [T, KV, D] into cache [KV, num_blocks, block_size, D] at flat slots [T]."""
    if isinstance(cache, Int8Cache):
        codes, scales = quantize_rows(rows)
        _put(cache.codes, slots, codes)
        _put(cache.scales.unsqueeze(-1), slots, scales)
    else:
        _put(cache, slots, rows.to(cache.dtype))


def _put(cache: Tensor, slots: Tensor, rows: Tensor) -> None:
    cache.view(cache.shape[0], -1, cache.shape[3]).index_copy_(1, slots, rows.transpose(0, 1))


def attend(query: Tensor, keys: KVTensor, values: KVTensor, plan: AttentionPlan) -> Tensor:
    """query [T, H, D], keys and values [KV, num_blocks, block_size, D] -> [T, H * D].

    The step's own keys and values are in the cache already.
    """
    num_rows, heads, dim = query.shape
    kv_heads = keys.shape[0]
    folded = query.view(num_rows, kv_heads, heads // kv_heads, dim).transpose(0, 1)
    if not plan.chunks and len(plan.decodes) == 1 and plan.decodes[0].rows is None:
        out = _attend_decode(folded, keys, values, plan.decodes[0])
        return out.transpose(0, 1).reshape(num_rows, heads * dim)
    out = torch.empty(kv_heads, num_rows, heads // kv_heads, dim, dtype=query.dtype)
    for group in plan.decodes:
        rows = folded if group.rows is None else folded.index_select(1, group.rows)
        result = _attend_decode(rows, keys, values, group)
        out.index_copy_(1, group.rows, result) if group.rows is not None else out.copy_(result)
    for chunk in plan.chunks:
        out[:, chunk.start : chunk.end] = _attend_chunk(folded, keys, values, chunk)
    return out.transpose(0, 1).reshape(num_rows, heads * dim)


def _attend_decode(query: Tensor, keys: KVTensor, values: KVTensor, group: _DecodeGroup) -> Tensor:
    """query [KV, num_seqs, group, D] -> the same shape."""
    key, value = group.blocks.read(keys, query.dtype), group.blocks.read(values, query.dtype)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=group.mask)


def _attend_chunk(folded: Tensor, keys: KVTensor, values: KVTensor, chunk: _PrefillChunk) -> Tensor:
    """-> [KV, rows, group, D]."""
    query = folded[:, chunk.start : chunk.end].transpose(1, 2)  # [KV, group, rows, D]
    group = query.shape[1]
    key = chunk.blocks.read(keys, query.dtype).expand(-1, group, -1, -1)
    value = chunk.blocks.read(values, query.dtype).expand(-1, group, -1, -1)
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=chunk.mask, is_causal=chunk.mask is None
    )
    return out.transpose(1, 2)
