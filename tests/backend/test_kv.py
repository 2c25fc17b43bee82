"""The 8-bit KV cache: its arithmetic, and that it follows a request through everything the engine does with blocks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from backend.cpu.attention import attend, plan_attention, write_cache
from backend.engine.config import EngineConfig, kv_cache_blocks
from backend.engine.engine import LLMEngine
from backend.engine.params import StepOutput
from backend.models.batch import KVCache
from backend.models.errors import ModelLoadError
from backend.models.loader import LoadedModel, load_model
from backend.options import EngineOptions, WorkerSettings
from backend.quant.kv import Int8Cache, dequantize_rows, new_cache, quantize_rows, row_bytes
from backend.worker import load_engine
from tests.backend import tiny_llama
from tests.backend.toy_model import request, run


def rows(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def test_a_value_is_at_most_half_a_step_off() -> None:
    x = rows(50, 3, 64) * torch.logspace(-20, 20, 50).view(50, 1, 1)
    codes, scales = quantize_rows(x)
    assert codes.abs().max() == 127
    assert ((dequantize_rows(codes, scales, torch.float32) - x).abs() <= scales * 0.5001).all()


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    x = rows(9, 2, 16)
    codes, scales = quantize_rows(x)
    alone = [quantize_rows(x[i : i + 1]) for i in range(9)]
    assert torch.equal(codes, torch.cat([each for each, _ in alone]))
    assert torch.equal(scales, torch.cat([each for _, each in alone]))


@pytest.mark.parametrize("x", [torch.zeros(1, 8), torch.full((1, 8), 1e-45)], ids=["zero", "tiny"])
def test_a_row_of_nothing_stays_nothing(x: torch.Tensor) -> None:
    assert dequantize_rows(*quantize_rows(x), torch.float32).abs().max() <= 1e-44


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_number_stays_seen(value: float) -> None:
    x = rows(1, 8)
    x[0, 3] = value
    assert dequantize_rows(*quantize_rows(x), torch.float32).isnan().all()


def test_a_cache_takes_the_bytes_that_were_announced() -> None:
    cache = new_cache((2, 3, 4, 64), torch.int8)
    assert isinstance(cache, Int8Cache)
    held = sum(t.numel() * t.element_size() for t in KVCache([cache], [cache], 4).tensors())
    assert held == 2 * 2 * 3 * 4 * row_bytes(64, torch.int8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention_over_codes_is_attention_over_what_they_stand_for(dtype: torch.dtype) -> None:
    keys, values = (new_cache((2, 9, 4, 16), torch.int8) for _ in range(2))
    assert isinstance(keys, Int8Cache)
    assert isinstance(values, Int8Cache)
    write_cache(keys, torch.arange(36), rows(36, 2, 16).to(dtype))
    write_cache(values, torch.arange(36), rows(72, 2, 16)[36:].to(dtype))
    tables = torch.tensor([[7, 2, 5], [1, 8, 0], [3, 4, 6]], dtype=torch.int32)
    plan = plan_attention([0, 1, 6, 7], [9, 11, 3], tables, 4, dtype)
    query = rows(7, 6, 16).to(dtype)
    plain = (dequantize_rows(c.codes, c.scales.unsqueeze(-1), dtype) for c in (keys, values))
    assert torch.equal(attend(query, keys, values, plan), attend(query, *plain, plan))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama.write_folder(tmp_path_factory.mktemp("tiny"), tiny_llama.tensors())


@pytest.fixture(scope="module", params=["portable", "native"])
def loaded(request: pytest.FixtureRequest, folder: Path) -> Iterator[LoadedModel]:
    before = torch.get_num_threads()
    is_native = request.param == "native"
    model = load_model(folder, dtype="float32", kv_cache_dtype="int8", native=is_native, threads=1)
    if is_native and type(model.model).__name__ != "NativeLlama":
        pytest.skip("no native tier on this machine")
    yield model
    torch.set_num_threads(before)


SHARED = [(5 * j) % 250 + 3 for j in range(17)]
PROMPTS = [SHARED + [(7 * i * i + 3 * j) % 250 + 3 for j in range(13 + 3 * i)] for i in range(5)]
PLAIN: dict[str, Any] = {"block_size": 16, "num_blocks": 64, "enable_prefix_cache": False}
# What the engine does with blocks, and the counts that show it was done.
WAYS: dict[str, dict[str, Any]] = {
    "chunked prefill": {"max_num_batched_tokens": 7},
    "preemption": {"num_blocks": 9},
    "prefix cache": {"enable_prefix_cache": True},
    "n-gram speculation": {"speculative": "ngram"},
    "everything": {
        "max_num_batched_tokens": 11,
        "num_blocks": 14,
        "enable_prefix_cache": True,
        "speculative": "ngram",
    },
}


SHOWN_BY = {
    "preemption": ("num_preemptions",),
    "prefix cache": ("num_cached_tokens",),
    "n-gram speculation": ("num_draft_tokens",),
    "everything": ("num_preemptions", "num_cached_tokens", "num_draft_tokens"),
}


def answers(
    loaded: LoadedModel, *shown_by: str, draft: bool = False, **config: Any
) -> dict[str, StepOutput]:
    settings = EngineConfig(**{**PLAIN, **config})
    draft_model = loaded.model if draft else None
    engine = LLMEngine(loaded.model, loaded.tokenizer, settings, draft_model=draft_model)
    asked = [request(str(i), prompt, max_tokens=40, logprobs=0) for i, prompt in enumerate(PROMPTS)]
    run(engine, *asked)
    again = run(engine, *asked)
    assert [count for count in shown_by if getattr(engine.stats(), count) == 0] == []
    return again


@pytest.fixture(scope="module")
def plain(loaded: LoadedModel) -> dict[str, StepOutput]:
    return answers(loaded)


def assert_same(found: dict[str, StepOutput], wanted: dict[str, StepOutput]) -> None:
    for name, output in wanted.items():
        assert found[name].token_ids == output.token_ids
        pairs = zip(found[name].logprobs, output.logprobs, strict=True)
        assert max(abs(a.logprob - b.logprob) for a, b in pairs) < 1e-3


@pytest.mark.parametrize("way", WAYS)
def test_an_answer_is_the_same_with(
    way: str, loaded: LoadedModel, plain: dict[str, StepOutput]
) -> None:
    assert_same(answers(loaded, *SHOWN_BY.get(way, ()), **WAYS[way]), plain)


def test_an_answer_is_the_same_with_a_draft_model(
    loaded: LoadedModel, plain: dict[str, StepOutput]
) -> None:
    assert_same(answers(loaded, "num_accepted_tokens", draft=True), plain)


def test_logprobs_stay_near_those_of_the_exact_cache(loaded: LoadedModel, folder: Path) -> None:
    exact = load_model(folder, dtype="float32", native=False).model
    results = []
    for model in (loaded.model, exact):
        kv = model.new_kv_cache(4, 16)
        tiny_llama.step(model, kv, [PROMPTS[0]], [30], [[2, 0]])
        results.append(tiny_llama.step(model, kv, [[5]], [31], [[2, 0]]).log_softmax(-1))
    difference = (results[0] - results[1]).abs().max()
    assert 0 < difference < 0.05


def test_the_same_memory_holds_three_times_the_blocks_of_float32(folder: Path) -> None:
    counts = []
    for kind in ("float32", "int8"):
        model = load_model(folder, dtype="float32", kv_cache_dtype=kind, native=False).model
        counts.append(kv_cache_blocks(EngineConfig(kv_cache_gb=0.01), model.kv_bytes_per_block(16)))
    assert counts[1] == pytest.approx(counts[0] * 64 / (16 + 4), rel=0.01)  # heads of 16


def test_the_format_is_part_of_the_fingerprint(folder: Path) -> None:
    kinds = ("float32", "bfloat16", "int8")
    prints = {
        load_model(folder, dtype="float32", kv_cache_dtype=k, native=n).model.fingerprint
        for k in kinds
        for n in (False, True)
    }
    assert len(prints) == len(kinds) * 2


def test_an_unknown_format_is_refused_by_name(folder: Path) -> None:
    with pytest.raises(ModelLoadError, match="kv_cache_dtype must be one of auto, float32"):
        load_model(folder, kv_cache_dtype="fp8")


def test_the_option_reaches_the_model(folder: Path) -> None:
    options = EngineOptions(kv_cache_dtype="int8", num_blocks=8)
    settings = WorkerSettings("local/0", "", str(folder), "", threads=1, options=options)
    assert load_engine(settings).fingerprint.endswith("-int8")
