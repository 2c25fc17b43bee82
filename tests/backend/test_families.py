"""Every family against transformers' logits, over its windows, in chunks, in company, and from both file formats."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from backend.engine.config import EngineConfig
from backend.engine.engine import LLMEngine
from backend.models.checkpoint import SafetensorsCheckpoint
from backend.models.gguf import GGUFFile
from backend.models.gguf_checkpoint import GGUFCheckpoint
from backend.models.llama import Llama
from backend.models.loader import load_model
from tests.backend import tiny_families, tiny_llama
from tests.backend.tiny_families import FAMILIES, GGUF_ARCHS, expected, gguf_model, model
from tests.backend.tiny_llama import make_batch, step
from tests.backend.toy_model import ToyTokenizer, request, run

pytestmark = pytest.mark.usefixtures("one_thread")

TOLERANCE = 1e-3
BLOCK = 4


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


def test_older_ggufs_hold_a_tensor_for_each_expert(tmp_path: Path) -> None:
    ids, logits = expected("mixtral")
    path = tiny_families.write_gguf("mixtral", tmp_path / "old.gguf", stacked=False)
    old = tiny_families.model_of(GGUFCheckpoint(GGUFFile(path)))
    assert (all_logits(old, ids, [len(ids)]) - logits).abs().max() < TOLERANCE


def test_a_model_that_also_sees_is_served_by_its_text_part(tmp_path: Path) -> None:
    """Gemma 3's published layout: the settings under text_config, the tensors under language_model."""
    ids, logits = expected("gemma3")
    settings = tiny_families.settings("gemma3")
    inner = {key: value for key, value in settings.items() if key != "architectures"}
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": inner}
    tensors = {f"language_model.{k}": v for k, v in tiny_families.tensors("gemma3").items()}
    tensors["vision_tower.patch.weight"] = torch.ones(2, 3, 4, 4)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(outer))
    seen = tiny_families.model_of(SafetensorsCheckpoint(tmp_path))
    assert (all_logits(seen, ids, [len(ids)]) - logits).abs().max() < TOLERANCE


@pytest.mark.parametrize("rows", [1, 5])
def test_blocks_behind_the_window_are_never_read(rows: int) -> None:
    """The scheduler takes them away; here they lead to a block of NaN."""
    mistral = model("mistral")
    assert mistral.window == 8
    ids, logits = expected("mistral")
    kv, table = mistral.new_kv_cache(16, BLOCK), blocks_for(len(ids))
    step(mistral, kv, [ids[:-rows]], [len(ids) - rows], [table])
    for tensor in (*kv.keys, *kv.values):
        tensor[:, 15] = float("nan")
    behind = (len(ids) - rows + 1 - mistral.window) // BLOCK
    table[:behind] = [15] * behind
    got = step(mistral, kv, [ids[-rows:]], [len(ids)], [table])[0]
    assert (got - logits[-1]).abs().max() < TOLERANCE


def test_layers_that_share_a_cache_take_no_memory_for_it() -> None:
    shared = model("llama_shared_kv")
    kv = shared.new_kv_cache(8, BLOCK)
    assert (len(kv.keys), shared.config.num_layers) == (2, 4)
    assert shared.kv_bytes_per_block(BLOCK) * 8 == sum(t.nbytes for t in (*kv.keys, *kv.values))


def test_half_precision_is_near(loaded: Llama, family: str) -> None:
    ids, logits = expected(family)
    got = all_logits(model(family, torch.bfloat16), ids, [len(ids)])
    assert torch.nn.functional.cosine_similarity(got, logits).median() > 0.99


PROMPTS = [[5, 9, 40, 41, 7, 12, 80, 33, 21, 60, 61], [3], [5, 9, 40, 41, 7, 12, 80, 33, 77, 78]]


@pytest.mark.parametrize("budget", [3, 64])
def test_the_engine_serves_every_family_as_it_runs_alone(
    loaded: Llama, family: str, budget: int
) -> None:
    """Chunks, batches, a prefix hit, blocks behind a window given back: the greedy text is that of whole prompts."""
    config = EngineConfig(block_size=4, num_blocks=12, max_num_batched_tokens=budget)
    engine = LLMEngine(loaded, ToyTokenizer([b"x"] * loaded.vocab_size), config)
    items = [request(str(i), ids, max_tokens=14) for i, ids in enumerate(PROMPTS)]
    outputs = run(engine, *items)
    assert engine.stats().num_cached_tokens > 0
    for i, ids in enumerate(PROMPTS):
        wanted = list(ids)
        for _ in range(14):
            wanted.append(int(all_logits(loaded, wanted, [len(wanted)])[-1].argmax()))
        assert outputs[str(i)].token_ids == wanted[len(ids) :]


def test_a_folder_loads_onto_the_tier_that_can_run_it(tmp_path: Path) -> None:
    tiny_llama.write_folder(tmp_path, {})
    for part in ("config.json", "model.safetensors"):
        (tmp_path / part).write_bytes((tiny_families.FOLDER / "qwen3" / part).read_bytes())
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] = dict(list(tokenizer["model"]["vocab"].items())[:90])
    tokenizer["model"]["merges"] = []
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    served = load_model(tmp_path, dtype="float32")
    assert isinstance(served.model, Llama)
    assert served.tier == "portable (the native tier has no norms on the heads of q and k)"
