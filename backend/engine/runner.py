"""Scheduled requests to one `Batch`, one forward pass, and the logits on the host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from backend.engine.request import EngineRequest
from backend.engine.scheduler import Scheduled
from backend.models.batch import Batch, Model, cdiv


class ModelRunner:
    """Holds the KV cache and a table of block ids with one row per slot, so a step only writes what is new."""

    def __init__(
        self, model: Model, num_blocks: int, block_size: int, max_num_seqs: int, max_model_len: int
    ) -> None:
        self._model = model
        self._block_size = block_size
        self._kv = model.new_kv_cache(num_blocks, block_size)
        self._device = self._kv.keys[0].device
        self._block_rows = np.zeros((max_num_seqs, cdiv(max_model_len, block_size)), np.int32)

    def run(self, scheduled: Sequence[Scheduled]) -> tuple[list[EngineRequest], np.ndarray]:
        """Compute one step -> the requests whose known tokens are now all computed, and their next-token
        logits [len(requests), vocab_size] float32."""
        batch, finished = self._batch(scheduled)
        with torch.inference_mode():
            logits = self._model.forward(batch, self._kv)
        return finished, logits.cpu().numpy()

    def scrub(self, blocks: Sequence[int]) -> None:
        """Zero blocks that may hold NaN: attention gives unwritten slots weight 0, and 0 x NaN is NaN."""
        index = torch.tensor(blocks, dtype=torch.int64, device=self._device)
        with torch.inference_mode():
            for tensor in (*self._kv.keys, *self._kv.values):
                tensor[:, index] = 0

    def _batch(self, scheduled: Sequence[Scheduled]) -> tuple[Batch, list[EngineRequest]]:
        num_seqs = len(scheduled)
        token_ids: list[int] = []
        starts, counts = np.empty(num_seqs, np.int64), np.empty(num_seqs, np.int64)
        slots = np.empty(num_seqs, np.int64)
        finished: list[EngineRequest] = []
        logits_rows: list[int] = []
        query_start, context_lens = [0], list[int]()
        for row, (request, num_tokens) in enumerate(scheduled):
            start = request.num_computed_tokens
            starts[row], counts[row], slots[row] = start, num_tokens, request.slot
            token_ids += request.token_ids[start : start + num_tokens]
            query_start.append(len(token_ids))
            context_lens.append(start + num_tokens)
            if start + num_tokens == request.num_tokens:
                finished.append(request)
                logits_rows.append(len(token_ids) - 1)
            self._mirror_blocks(request)
        positions = np.arange(len(token_ids)) + np.repeat(starts - query_start[:-1], counts)
        block_index, offset = np.divmod(positions, self._block_size)
        blocks = self._block_rows[np.repeat(slots, counts), block_index]
        width = cdiv(max(context_lens), self._block_size)
        batch = Batch(
            token_ids=self._tensor(np.array(token_ids, np.int64)),
            positions=self._tensor(positions),
            slot_mapping=self._tensor(blocks * np.int64(self._block_size) + offset),
            query_start=query_start,
            context_lens=context_lens,
            block_tables=self._tensor(self._block_rows[slots, :width]),
            logits_rows=self._tensor(np.array(logits_rows, np.int64)),
        )
        return batch, finished

    def _mirror_blocks(self, request: EngineRequest) -> None:
        known, table = request.num_mirrored_blocks, request.block_table
        if known == len(table):
            return
        row = self._block_rows[request.slot]
        if known == 0:
            row.fill(0)
        row[known : len(table)] = table[known:]
        request.num_mirrored_blocks = len(table)

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)
