"""Reports of users of other engines about quantized weights, each driven through ours."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from backend.engine.config import EngineConfig
from backend.engine.engine import LLMEngine
from backend.models.errors import ModelLoadError
from backend.models.loader import load_model
from tests.backend import tiny_llama
from tests.backend.quantized_folder import write_quantized
from tests.backend.toy_model import request, run

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPT = [3 + (7 * i) % 250 for i in range(90)]
GPTQ: Mapping[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False}


def engine(folder: Path, **options: Any) -> LLMEngine:
    model = load_model(folder, dtype="float32", threads=1, **options)
    return LLMEngine(model.model, model.tokenizer, EngineConfig(num_blocks=32), clock=lambda: 0.0)


def text(folder: Path, **options: Any) -> list[int]:
    return run(engine(folder, **options), request("a", PROMPT[:20], max_tokens=30))["a"].token_ids


@pytest.mark.parametrize("native", [False, True], ids=["portable", "native"])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
def test_report_53_vllm_38966_zero_points_of_either_version_give_the_text_of_the_dense_weights(
    tmp_path: Path, version: str, native: bool
) -> None:
    """Asymmetric; the zero points 0 and 15 have a test of their own beside the reader of the format."""
    folder, dense = write_quantized(tmp_path / "q", {**GPTQ, "checkpoint_format": version})
    plain = tiny_llama.write_folder(tmp_path / "dense", dense)
    got = text(folder, native=native)
    assert got == text(plain, native=False)
    assert len(set(got)) > 3


@pytest.mark.parametrize("word", [0, 0x77777777, -1])
def test_report_54_vllm_21066_zero_points_stored_beside_symmetric_weights_are_not_used(
    tmp_path: Path, word: int
) -> None:
    folder, dense = write_quantized(tmp_path / "q", {**GPTQ, "sym": True}, sym=True)
    stored = load_file(folder / "model.safetensors")
    changed = {k: torch.full_like(t, word) if "qzeros" in k else t for k, t in stored.items()}
    save_file(changed, folder / "model.safetensors")
    assert text(folder) == text(tiny_llama.write_folder(tmp_path / "dense", dense), native=False)


@pytest.mark.parametrize("native", [False, True], ids=["portable", "native"])
def test_report_55_vllm_13133_a_cache_of_eight_bits_keeps_perplexity_within_a_percent(
    tmp_path: Path, native: bool
) -> None:
    folder = tiny_llama.write_folder(tmp_path / "m", tiny_llama.tensors())

    def perplexity(kv_cache_dtype: str) -> float:
        item = request("a", PROMPT, prompt_logprobs=0, max_tokens=1)
        out = run(engine(folder, kv_cache_dtype=kv_cache_dtype, native=native), item)["a"]
        scores = [entry.logprob for entry in out.prompt_logprobs[1:]]
        return math.exp(-sum(scores) / len(scores))

    exact, packed = perplexity("float32"), perplexity("int8")
    assert packed != exact
    assert packed == pytest.approx(exact, rel=0.01)


def test_report_55_vllm_13133_a_cache_that_is_not_built_is_refused_by_name(tmp_path: Path) -> None:
    folder = tiny_llama.write_folder(tmp_path / "m", tiny_llama.tensors())
    with pytest.raises(ModelLoadError, match=r"kv_cache_dtype must be one of .*; got 'fp8'"):
        load_model(folder, kv_cache_dtype="fp8")
