"""What one forward pass sees. Rows of every scheduled request lie flattened behind one another; no globals."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, device

from backend.quant.kv import Int8Cache, KVTensor


@dataclass(slots=True)
class Batch:
    """One engine step.

    Sequence `i` owns the rows `query_start[i]:query_start[i + 1]`; it has `context_lens[i]` tokens in the
    cache once those rows are written, so its rows sit at positions `context_lens[i] - rows .. context_lens[i] - 1`.
    """

    token_ids: Tensor  # [num_tokens] int64
    positions: Tensor  # [num_tokens] int64
    slot_mapping: Tensor  # [num_tokens] int64: block_id * block_size + offset, where each row's key and value go
    query_start: list[int]  # [num_seqs + 1]
    context_lens: list[int]  # [num_seqs]
    block_tables: Tensor  # [num_seqs, max_blocks] int32, padded with 0
    logits_rows: Tensor  # [num_logits] int64: the rows whose logits, or hidden states, are wanted


@dataclass(slots=True)
class KVCache:
    """Paged keys and values, each `[num_kv_heads, num_blocks, block_size, head_dim]`.

    One pair for each layer that has its own, in order; layers that read another's bring none.
    """

    keys: list[KVTensor]
    values: list[KVTensor]
    block_size: int

    @property
    def num_blocks(self) -> int:
        return self.keys[0].shape[1]

    @property
    def device(self) -> device:
        return self.keys[0].device

    def tensors(self) -> Iterator[Tensor]:
        """Every plain tensor, `[num_kv_heads, num_blocks, block_size, ...]`: what a copy of blocks must carry."""
        for cache in (*self.keys, *self.values):
            if isinstance(cache, Int8Cache):
                yield cache.codes
                yield cache.scales
            else:
                yield cache


class Model(Protocol):
    """What the runner needs of a loaded model, whatever its family, number format or device."""

    vocab_size: int
    hidden_size: int
    max_position: int  # longest context, in tokens
    fingerprint: str  # weights and all number formats: part of every prefix-cache key
    # How many tokens back any layer looks, the token itself included; None: some layer looks back to the beginning.
    # Blocks behind it are taken away, and their entries of `block_tables` lead to a block of zeros.
    window: int | None
    # A row's logits have the same bits whatever its batch mates and wherever its prompt was cut into chunks.
    is_batch_invariant: bool

    def kv_bytes_per_block(self, block_size: int) -> int: ...

    def new_kv_cache(self, num_blocks: int, block_size: int) -> KVCache: ...

    def forward(self, batch: Batch, kv: KVCache) -> Tensor:
        """Write the keys and values of every row, then return float32 logits `[num_logits, vocab_size]`.

        The same as `logits(hidden_states(batch, kv))`.
        """
        ...

    def hidden_states(self, batch: Batch, kv: KVCache) -> Tensor:
        """Write keys and values, then return what the head reads: float32 `[num_logits, hidden_size]`, normed."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """The head: `[rows, hidden_size]` -> float32 `[rows, vocab_size]`."""
        ...


def cdiv(a: int, b: int) -> int:
    return -(-a // b)
