"""Median time of one decode step, in process: `python bench/engine_step.py --batch 1 8 32 --context 160`.

Every sequence of the batch has `--context` cached tokens and adds one. `cpu ms` is the step's processor time over all
threads, which other load on the machine changes little; memory bandwidth is printed to judge the rest by.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch

from backend.models.batch import Batch, KVCache, Model, cdiv
from backend.models.demo import fetch_demo_model
from backend.models.loader import load_model

BLOCK_SIZE = 16


def main() -> None:
    args = parse_args()
    path = args.model or fetch_demo_model(Path("data"))
    loaded = load_model(
        path,
        dtype=args.dtype,
        quantization=args.quantization,
        activations=args.activations,
        threads=args.threads,
        native=args.native,
    )
    print(
        f"{loaded.name}: {type(loaded.model).__name__}, {loaded.model.fingerprint}, {torch.get_num_threads()} threads"
    )
    print(f"memory read: {read_bandwidth_gb_s():.1f} GB/s")
    print("batch  context  median ms  min ms  cpu ms  tokens/s")
    for batch in args.batch:
        report(loaded.model, batch, args.context, args.steps, args.prefill)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--model", type=Path, help="a .gguf file or model folder; the demo model if absent"
    )
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--activations", default="auto")
    parser.add_argument("--native", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=160)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument(
        "--prefill", action="store_true", help="time whole prompts of `--context` tokens instead"
    )
    return parser.parse_args()


def report(model: Model, num_seqs: int, context: int, steps: int, prefill: bool) -> None:
    rows = context if prefill else 1
    batch, kv = make_step(model, num_seqs, context, rows)
    model.forward(batch, kv)
    wall_ms, cpu_ms = [], []
    for _ in range(steps):
        wall, cpu = time.perf_counter(), time.process_time()
        model.forward(batch, kv)
        wall_ms.append((time.perf_counter() - wall) * 1e3)
        cpu_ms.append((time.process_time() - cpu) * 1e3)
    median = statistics.median(wall_ms)
    rate = num_seqs * rows / median * 1e3
    print(
        f"{num_seqs:5}  {context:7}  {median:9.2f}  {min(wall_ms):6.2f}  {statistics.median(cpu_ms):6.1f}  {rate:8.1f}"
    )


def make_step(model: Model, num_seqs: int, context: int, rows: int) -> tuple[Batch, KVCache]:
    """Each sequence's blocks lie apart from each other, as after some traffic."""
    blocks_each = cdiv(context, BLOCK_SIZE)
    kv = model.new_kv_cache(num_seqs * blocks_each, BLOCK_SIZE)
    tables = (
        torch.arange(num_seqs * blocks_each, dtype=torch.int32)
        .view(blocks_each, num_seqs)
        .T.contiguous()
    )
    positions = torch.arange(context - rows, context)
    slots = tables[:, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    num_tokens = num_seqs * rows
    batch = Batch(
        token_ids=torch.arange(num_tokens) * 37 % model.vocab_size,
        positions=positions.repeat(num_seqs),
        slot_mapping=slots.reshape(-1).long(),
        query_start=list(range(0, num_tokens + 1, rows)),
        context_lens=[context] * num_seqs,
        block_tables=tables,
        logits_rows=torch.arange(rows - 1, num_tokens, rows),
    )
    return batch, kv


def read_bandwidth_gb_s() -> float:
    data = torch.ones(1 << 26)
    best_s = min(_timed_sum_s(data) for _ in range(5))
    return data.nbytes / best_s / 1e9


def _timed_sum_s(data: torch.Tensor) -> float:
    start = time.perf_counter()
    data.sum()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
