"""Every family against transformers' logits, over its windows, in chunks, in company, and from both file formats."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from backend.models.llama import Llama
from tests.backend.tiny_families import FAMILIES, GGUF_ARCHS, expected, gguf_model, model
from tests.backend.tiny_llama import make_batch, step

TOLERANCE = 1e-3
BLOCK = 4


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def loaded(family: str) -> Llama:
    return model(family)


def blocks_for(num_tokens: int, first: int = 0) -> list[int]:
    return list(range(first, first - (-num_tokens // BLOCK)))


def all_logits(model: Llama, ids: list[int], sizes: list[int]) -> Tensor:
    """Every row's logits, computed in steps of these sizes (the last of them again and again)."""
    kv, table, out, start = model.new_kv_cache(16, BLOCK), blocks_for(len(ids)), [], 0
    while start < len(ids):
        size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
        rows = ids[start : start + size]
        start += len(rows)
        batch = make_batch(kv, [rows], [start], [table])
        batch.logits_rows = torch.arange(len(rows))
        out.append(model.forward(batch, kv))
    return torch.cat(out)


def test_a_whole_prompt_has_the_logits_of_transformers(loaded: Llama, family: str) -> None:
    ids, logits = expected(family)
    assert (all_logits(loaded, ids, [len(ids)]) - logits).abs().max() < TOLERANCE


@pytest.mark.parametrize("sizes", [[13, 9, 1], [1], [3], [7, 8]], ids=str)
def test_chunks_and_single_steps_have_the_logits_of_transformers(
    loaded: Llama, family: str, sizes: list[int]
) -> None:
    ids, logits = expected(family)
    assert (all_logits(loaded, ids, sizes.copy()) - logits).abs().max() < TOLERANCE


def test_a_batch_of_three_has_the_logits_of_transformers(loaded: Llama, family: str) -> None:
    """A long and a short decode beside a later chunk; scattered blocks."""
    ids, logits = expected(family)
    lengths, new = [44, 6, 30], [1, 1, 11]
    kv = loaded.new_kv_cache(40, BLOCK)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(3)).tolist()
    tables = [[order.pop() for _ in blocks_for(n)] for n in lengths]
    for length, count, table in zip(lengths, new, tables, strict=True):
        step(loaded, kv, [ids[: length - count]], [length - count], [table])
    rows = [ids[n - count : n] for n, count in zip(lengths, new, strict=True)]
    got = step(loaded, kv, rows, lengths, tables)
    assert (got - logits[[n - 1 for n in lengths]]).abs().max() < TOLERANCE


@pytest.mark.parametrize("name", GGUF_ARCHS)
def test_a_gguf_of_the_model_has_the_logits_of_transformers(name: str, tmp_path: Path) -> None:
    ids, logits = expected(name)
    if name == "qwen2":  # its windows have no place in a GGUF
        ids, logits = ids[:8], logits[:8]
    got = all_logits(gguf_model(name, tmp_path), ids, [len(ids)])
    assert (got - logits).abs().max() < TOLERANCE
