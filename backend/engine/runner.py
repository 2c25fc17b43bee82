"""Rows of requests to one `Batch`, one forward pass, and the logits on the host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from backend.engine.request import EngineRequest, Rows
from backend.models.batch import Batch, Model, cdiv


class StepResult(NamedTuple):
    """What a step made, in the order of its rows."""

    logits: np.ndarray  # [sum of num_logits, vocab_size] float32
    hidden: np.ndarray  # [sum of num_hidden, hidden_size] float32

    def by_request(self, rows: Sequence[Rows]) -> Iterator[tuple[Rows, np.ndarray, np.ndarray]]:
        """The logits and hidden states of each of the step's rows."""
        num_logits = num_hidden = 0
        for item in rows:
            logits = self.logits[num_logits : num_logits + item.num_logits]
            hidden = self.hidden[num_hidden : num_hidden + item.num_hidden]
            yield item, logits, hidden
            num_logits, num_hidden = num_logits + item.num_logits, num_hidden + item.num_hidden


class ModelRunner:
    """Holds the KV cache and a table of block ids with one row per slot, so a step only writes what is new."""

    def __init__(
        self, model: Model, num_blocks: int, block_size: int, block_rows: np.ndarray
    ) -> None:
        """`block_rows` [max_num_seqs, blocks of the longest context] int32 may be shared by runners of one engine."""
        self._model = model
        self._block_size = block_size
        # One block more than the pool has: it stays zero and stands for those behind a sliding window.
        self._null_block = num_blocks
        self._kv = model.new_kv_cache(num_blocks + (model.window is not None), block_size)
        self._device = self._kv.device
        self._block_rows = block_rows

    def run(self, rows: Sequence[Rows]) -> StepResult:
        """Compute one step."""
        batch = self._batch(rows)
        with torch.inference_mode():
            if not any(item.num_hidden for item in rows):
                logits = self._model.forward(batch, self._kv)
                return StepResult(logits.cpu().numpy(), np.empty((0, self._model.hidden_size)))
            hidden = self._model.hidden_states(batch, self._kv)
            for_logits = self._tensor(np.fromiter(_outputs(rows, "num_logits"), np.int64))
            logits = self._model.logits(hidden[for_logits])
            wanted = self._tensor(np.fromiter(_outputs(rows, "num_hidden"), np.int64))
            return StepResult(logits.cpu().numpy(), hidden[wanted].cpu().numpy())

    def scrub(self, blocks: Sequence[int]) -> None:
        """Zero blocks that may hold NaN: attention gives unwritten slots weight 0, and 0 x NaN is NaN."""
        index = torch.tensor(blocks, dtype=torch.int64, device=self._device)
        with torch.inference_mode():
            for tensor in self._kv.tensors():
                tensor[:, index] = 0

    def _batch(self, rows: Sequence[Rows]) -> Batch:
        num_seqs = len(rows)
        token_ids: list[int] = []
        starts, counts = np.empty(num_seqs, np.int64), np.empty(num_seqs, np.int64)
        slots = np.empty(num_seqs, np.int64)
        logits_rows: list[int] = []
        query_start, context_lens = [0], list[int]()
        for i, item in enumerate(rows):
            request, start, tokens = item.request, item.start, item.token_ids
            starts[i], counts[i], slots[i] = start, len(tokens), request.slot
            token_ids += tokens
            query_start.append(len(token_ids))
            context_lens.append(start + len(tokens))
            logits_rows += range(len(token_ids) - item.num_outputs, len(token_ids))
            self._mirror_blocks(request)
        positions = np.arange(len(token_ids)) + np.repeat(starts - query_start[:-1], counts)
        block_index, offset = np.divmod(positions, self._block_size)
        blocks = self._block_rows[np.repeat(slots, counts), block_index]
        width = cdiv(max(context_lens), self._block_size)
        return Batch(
            token_ids=self._tensor(np.array(token_ids, np.int64)),
            positions=self._tensor(positions),
            slot_mapping=self._tensor(blocks * np.int64(self._block_size) + offset),
            query_start=query_start,
            context_lens=context_lens,
            block_tables=self._tensor(self._block_rows[slots, :width]),
            logits_rows=self._tensor(np.array(logits_rows, np.int64)),
        )

    def _mirror_blocks(self, request: EngineRequest) -> None:
        known, table = request.num_mirrored_blocks, request.block_table
        row = self._block_rows[request.slot]
        if known < len(table):
            if known == 0:
                row.fill(0)
            row[known : len(table)] = table[known:]
            request.num_mirrored_blocks = len(table)
        row[: request.num_hidden_blocks] = self._null_block

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)


def _outputs(rows: Sequence[Rows], count: str) -> Iterator[int]:
    """Which of the step's outputs are the last `count` (a field of `Rows`) of each request."""
    end = 0
    for item in rows:
        end += item.num_outputs
        yield from range(end - getattr(item, count), end)
