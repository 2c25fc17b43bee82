"""Step times of the native CPU tier: decode at several batch sizes, prefill at several lengths.

    python bench/native_step.py --model MODEL.gguf [--threads 2] [--context 160] [--repeat 15]
        [--activations int8]

Prints the median of each step with the bytes that it must move (packed weights once, the keys and values it reads)
and the GB/s that this makes. Beside it, from the same run: all linears of such a step as torch float32 `F.linear`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn.functional import linear

from backend.models.batch import Batch, KVCache, cdiv
from backend.models.gguf import GGUFFile
from backend.models.gguf_checkpoint import GGUFCheckpoint
from backend.models.llama import LlamaWeights, read_llama_weights
from backend.models.native_llama import NativeLlama

BLOCK_SIZE = 16


def make_batch(num_seqs: int, rows: int, context: int, vocab_size: int) -> Batch:
    """`num_seqs` sequences, each with `rows` new tokens at the end of `context`; blocks are scattered."""
    blocks = cdiv(context, BLOCK_SIZE)
    tables = torch.randperm(num_seqs * blocks).view(num_seqs, blocks)
    positions = torch.arange(context - rows, context).repeat(num_seqs)
    owner = torch.arange(num_seqs).repeat_interleave(rows)
    slots = tables[owner, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    starts = [i * rows for i in range(num_seqs + 1)]
    return Batch(
        token_ids=torch.randint(0, vocab_size, (num_seqs * rows,)),
        positions=positions,
        slot_mapping=slots,
        query_start=starts,
        context_lens=[context] * num_seqs,
        block_tables=tables.int(),
        logits_rows=torch.tensor([end - 1 for end in starts[1:]]),
    )


def median_ms(step: Callable[[], object], repeat: int) -> float:
    step()
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


class TorchLinears:
    """What the linears alone cost in torch float32: no norms, no attention, no gate."""

    def __init__(self, weights: LlamaWeights) -> None:
        self.layers = [
            [
                torch.cat([w.dequantize() for w in group])
                for group in (layer.qkv, [layer.attn_out], layer.gate_up)
            ]
            + [layer.down.dequantize()]
            for layer in weights.layers
        ]
        self.head = weights.lm_head.dequantize()

    def __call__(self, rows: int, logits_rows: int) -> None:
        x, act = torch.ones(rows, self.head.shape[1]), torch.ones(rows, self.layers[0][3].shape[1])
        for qkv, out, gate_up, down in self.layers:
            linear(x, qkv), linear(x, out), linear(x, gate_up), linear(act, down)
        linear(x[:logits_rows], self.head)


def cases(context: int) -> list[tuple[int, int, int]]:
    """(sequences, new rows of each, context)"""
    decode = [(num_seqs, 1, context) for num_seqs in (1, 2, 4, 8, 16, 32)]
    return [*decode, (1, 1, 1024), *((1, rows, rows) for rows in (128, 512, 2048))]


def native_ms(model: NativeLlama, kv: KVCache, case: tuple[int, int, int], repeat: int) -> float:
    batch = make_batch(*case, model.vocab_size)
    return median_ms(
        lambda: model.forward(batch, kv), repeat if case[1] == 1 else max(3, repeat // 3)
    )


def line(model: NativeLlama, case: tuple[int, int, int], ms: float, torch_ms: float) -> str:
    num_seqs, rows, context = case
    cached = num_seqs * cdiv(context, BLOCK_SIZE) * model.kv_bytes_per_block(BLOCK_SIZE)
    num_bytes = model.weight_bytes + cached
    name = f"decode B={num_seqs} ctx {context}" if rows == 1 else f"prefill {rows}"
    return (
        f"{name:<22}{ms:9.2f} ms{num_seqs * rows / ms * 1e3:7.0f} tok/s{num_bytes / 1e6:6.0f} MB"
        f"{num_bytes / ms / 1e6:6.1f} GB/s   torch linears {torch_ms:8.2f} ms {torch_ms / ms:5.1f}x"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--activations", choices=("float32", "int8"), default="float32")
    parser.add_argument("--context", type=int, default=160)
    parser.add_argument("--repeat", type=int, default=15)
    args = parser.parse_args()
    checkpoint = GGUFCheckpoint(GGUFFile(args.model))
    weights = read_llama_weights(checkpoint, checkpoint.config)
    model = NativeLlama(
        checkpoint.config, weights, threads=args.threads, activations=args.activations
    )
    torch.set_num_threads(model.threads)
    print(
        f"{model.threads} threads, load {os.getloadavg()[0]:.2f}, {model.weight_bytes / 1e6:.0f} MB of weights"
    )
    kv = model.new_kv_cache(max(32 * cdiv(args.context, BLOCK_SIZE), 128), BLOCK_SIZE)
    native = [native_ms(model, kv, case, args.repeat) for case in cases(args.context)]
    linears = TorchLinears(weights)  # only now: torch's idle threads spin for a while
    for case, ms in zip(cases(args.context), native, strict=True):
        num_seqs, rows, _ = case
        torch_ms = median_ms(lambda n=num_seqs, r=rows: linears(n * r, n), max(3, args.repeat // 3))
        print(line(model, case, ms, torch_ms))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
