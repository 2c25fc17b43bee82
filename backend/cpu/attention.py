"""Paged attention on the CPU by plain torch: gather a sequence's blocks, then scaled dot product.

The query heads that share one KV head are folded into the query axis, so a decode step asks the kernel for `group`
rows instead of one: with a single row its bfloat16 path is five times slower. All that depends on the step and not
on the layer (block indices, masks) is worked out once in `plan_attention`, for each window that a model has.
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
    num_tokens: int  # for each sequence, padding and the rest of a block behind the window included
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
    mask: Tensor | None  # additive [1, num_seqs, 1, num_tokens]; None: every token is seen


@dataclass(frozen=True, slots=True)
class _PrefillChunk:
    """One sequence with several new rows, `start` to `end`, the last of the tokens that `blocks` hold."""

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
    window: int | None

    def rows(self, seq: int) -> int:
        return self.query_start[seq + 1] - self.query_start[seq]

    def first_seen(self, seq: int) -> int:
        """The earliest position that a row of this step sees; what lies before may have left the cache."""
        if self.window is None:
            return 0
        return max(0, self.context_lens[seq] - self.rows(seq) + 1 - self.window)

    def blocks(self, seq: int) -> list[int]:
        """Those that hold a position which a row sees."""
        end = -(-self.context_lens[seq] // self.block_size)
        return self.tables[seq][self.first_seen(seq) // self.block_size : end]

    def start_of_blocks(self, seq: int) -> int:
        """The position of their first token."""
        return self.first_seen(seq) // self.block_size * self.block_size


def plan_attention(
    query_start: Sequence[int],
    context_lens: Sequence[int],
    block_tables: Tensor,
    block_size: int,
    dtype: torch.dtype,
    *,
    window: int | None = None,
) -> AttentionPlan:
    """Lay out a step; the arguments are those of `Batch`, `dtype` is that of the queries.

    With a window a row sees that many positions, its own included; entries of `block_tables` behind it are not
    read. Single-row sequences are grouped by visible blocks to the next power of two, so padding at most doubles a
    read.
    """
    step = _Step(query_start, context_lens, block_tables.tolist(), block_size, dtype, window)
    groups: defaultdict[int, list[int]] = defaultdict(list)
    chunks: list[_PrefillChunk] = []
    for seq in range(len(context_lens)):
        rows = step.rows(seq)
        if rows == 1:
            groups[(len(step.blocks(seq)) - 1).bit_length()].append(seq)
        elif rows > 1:
            chunks.append(_prefill_chunk(seq, step))
    return AttentionPlan([_decode_group(seqs, step) for seqs in groups.values()], chunks)


def _prefill_chunk(seq: int, step: _Step) -> _PrefillChunk:
    start, end = step.query_start[seq], step.query_start[seq + 1]
    return _PrefillChunk(start, end, _one_sequence(seq, step), _chunk_mask(seq, step))


def _chunk_mask(seq: int, step: _Step) -> Tensor | None:
    rows, seen = step.rows(seq), step.context_lens[seq] - step.start_of_blocks(seq)
    beyond_window = step.window is not None and step.context_lens[seq] > step.window
    if rows == seen and not beyond_window:
        return None
    hidden = torch.ones(rows, seen, dtype=torch.bool).triu_(seen - rows + 1)
    if step.window is not None and beyond_window:
        hidden |= torch.ones(rows, seen, dtype=torch.bool).tril_(seen - rows - step.window)
    return _additive(hidden, step.dtype)


def _decode_group(seqs: list[int], step: _Step) -> _DecodeGroup:
    every_row = len(seqs) == step.query_start[-1]
    rows = None if every_row else torch.tensor([step.query_start[s] for s in seqs])
    ends = [step.context_lens[s] - step.start_of_blocks(s) for s in seqs]
    starts = [step.first_seen(s) - step.start_of_blocks(s) for s in seqs]
    longest = max(ends)
    if len(seqs) == 1:
        blocks = _one_sequence(seqs[0], step)
    else:
        tables = [step.blocks(s) for s in seqs]
        widest = max(map(len, tables))
        padded = [table + table[-1:] * (widest - len(table)) for table in tables]
        blocks = _Blocks(len(seqs), longest, 0, torch.tensor(padded).view(-1))
    if min(ends) == longest and not any(starts):
        return _DecodeGroup(rows, blocks, None)
    at = torch.arange(longest)
    hidden = (at >= torch.tensor(ends).unsqueeze(1)) | (at < torch.tensor(starts).unsqueeze(1))
    return _DecodeGroup(rows, blocks, _additive(hidden, step.dtype)[None, :, None])


def _one_sequence(seq: int, step: _Step) -> _Blocks:
    used = step.blocks(seq)
    num_tokens = step.context_lens[seq] - step.start_of_blocks(seq)
    consecutive = used == list(range(used[0], used[0] + len(used)))
    return _Blocks(1, num_tokens, used[0], None if consecutive else torch.tensor(used))


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


@dataclass(frozen=True, slots=True)
class Scoring:
    """How a model turns products of queries and keys into scores."""

    scale: float | None = None  # None: 1 / sqrt(head_dim)
    softcap: float | None = None  # scores become cap * tanh(score / cap)


_PLAIN = Scoring()


def attend(
    query: Tensor,
    keys: KVTensor,
    values: KVTensor,
    plan: AttentionPlan,
    scoring: Scoring = _PLAIN,
) -> Tensor:
    """query [T, H, D], keys and values [KV, num_blocks, block_size, D] -> [T, H * D].

    The step's own keys and values are in the cache already.
    """
    num_rows, heads, dim = query.shape
    kv_heads = keys.shape[0]
    folded = query.view(num_rows, kv_heads, heads // kv_heads, dim).transpose(0, 1)
    if not plan.chunks and len(plan.decodes) == 1 and plan.decodes[0].rows is None:
        out = _attend_decode(folded, keys, values, plan.decodes[0], scoring)
        return out.transpose(0, 1).reshape(num_rows, heads * dim)
    out = torch.empty(kv_heads, num_rows, heads // kv_heads, dim, dtype=query.dtype)
    for group in plan.decodes:
        rows = folded if group.rows is None else folded.index_select(1, group.rows)
        result = _attend_decode(rows, keys, values, group, scoring)
        out.index_copy_(1, group.rows, result) if group.rows is not None else out.copy_(result)
    for chunk in plan.chunks:
        out[:, chunk.start : chunk.end] = _attend_chunk(folded, keys, values, chunk, scoring)
    return out.transpose(0, 1).reshape(num_rows, heads * dim)


def _attend_decode(
    query: Tensor, keys: KVTensor, values: KVTensor, group: _DecodeGroup, scoring: Scoring
) -> Tensor:
    """query [KV, num_seqs, group, D] -> the same shape."""
    key, value = group.blocks.read(keys, query.dtype), group.blocks.read(values, query.dtype)
    if scoring.softcap is not None:
        return _capped_attention(query, key, value, group.mask, scoring)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=group.mask, scale=scoring.scale
    )


def _attend_chunk(
    folded: Tensor, keys: KVTensor, values: KVTensor, chunk: _PrefillChunk, scoring: Scoring
) -> Tensor:
    """-> [KV, rows, group, D]."""
    query = folded[:, chunk.start : chunk.end].transpose(1, 2)  # [KV, group, rows, D]
    group, rows = query.shape[1:3]
    key = chunk.blocks.read(keys, query.dtype).expand(-1, group, -1, -1)
    value = chunk.blocks.read(values, query.dtype).expand(-1, group, -1, -1)
    if scoring.softcap is not None:
        mask = chunk.mask if chunk.mask is not None else _causal(rows, query.dtype)
        out = _capped_attention(query, key, value, mask, scoring)
    else:
        out = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=chunk.mask,
            is_causal=chunk.mask is None,
            scale=scoring.scale,
        )
    return out.transpose(1, 2)


def _causal(rows: int, dtype: torch.dtype) -> Tensor:
    return _additive(torch.ones(rows, rows, dtype=torch.bool).triu_(1), dtype)


def _capped_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scoring: Scoring
) -> Tensor:
    """[..., rows, D] over [..., tokens, D]; the cap comes before the mask, so what is hidden stays hidden."""
    cap, scale = scoring.softcap or 1.0, scoring.scale or query.shape[-1] ** -0.5
    scores = (query @ key.transpose(-1, -2)).float().mul_(scale / cap).tanh_().mul_(cap)
    if mask is not None:
        scores += mask
    return scores.softmax(dim=-1).to(value.dtype) @ value
