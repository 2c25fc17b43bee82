from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from backend.models.loader import LoadedModel, load_model
from backend.perplexity import perplexity
from backend.quantize.measure import held_text
from tests.backend import tiny_llama

TEXT = "hello world, hello all: the text is longer than one window of this model. " * 5


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tiny_llama.write_folder(tmp_path_factory.mktemp("tiny"), tiny_llama.tensors())
    return load_model(folder, dtype="float32", native=False)


def by_formula(token_ids: list[int], window: int) -> float:
    logprobs: list[float] = []
    for start in range(0, len(token_ids), window):
        part = token_ids[start : start + window]
        law = tiny_llama.dense_logits(tiny_llama.tensors(), part).log_softmax(-1)
        logprobs += [float(law[i, token]) for i, token in enumerate(part[1:])]
    return math.exp(-sum(logprobs) / len(logprobs))


def test_it_is_that_of_the_formula_window_by_window(loaded: LoadedModel) -> None:
    token_ids = loaded.tokenizer.encode(TEXT)
    assert len(token_ids) > 2 * loaded.model.max_position
    wanted = by_formula(token_ids, loaded.model.max_position)
    assert perplexity(loaded.model, loaded.tokenizer, TEXT) == pytest.approx(wanted, rel=1e-4)


def test_only_the_first_tokens_count_where_that_is_asked(loaded: LoadedModel) -> None:
    wanted = by_formula(loaded.tokenizer.encode(TEXT)[:40], 128)
    found = perplexity(loaded.model, loaded.tokenizer, TEXT, max_tokens=40)
    assert found == pytest.approx(wanted, rel=1e-4)


def test_a_last_window_of_one_token_has_nothing_to_score(loaded: LoadedModel) -> None:
    found = perplexity(loaded.model, loaded.tokenizer, TEXT, max_tokens=129)
    assert found == perplexity(loaded.model, loaded.tokenizer, TEXT, max_tokens=128)


def test_every_window_is_told(loaded: LoadedModel) -> None:
    told: list[int] = []
    perplexity(loaded.model, loaded.tokenizer, TEXT, max_tokens=200, note=told.append)
    assert told == [128, 72]


def test_a_text_of_one_token_is_refused(loaded: LoadedModel) -> None:
    with pytest.raises(ValueError, match="two tokens or more, the text has 1"):
        perplexity(loaded.model, loaded.tokenizer, "h")


# Percent above float32 that each format may cost the demo model.
LIMITS: dict[str, tuple[dict[str, Any], float]] = {
    "w8": ({"quantization": "w8"}, 0.5),
    "w4, groups of 32": ({"quantization": "w4"}, 4.0),
    "w8a8": ({"quantization": "w8a8"}, 2.0),
    "8-bit KV cache": ({"kv_cache_dtype": "int8"}, 0.5),
    "8-bit KV cache, portable tier": ({"kv_cache_dtype": "int8", "native": False}, 0.5),
}


@pytest.fixture(scope="module")
def exact(demo_model_path: Path) -> float:
    return demo_perplexity(demo_model_path, quantization="none")


def demo_perplexity(path: Path, **formats: Any) -> float:
    model = load_model(path, dtype="float32", threads=1, **formats)
    return perplexity(model.model, model.tokenizer, held_text())


@pytest.mark.exhaustive
@pytest.mark.model
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", LIMITS)
def test_a_format_costs_the_demo_model_no_more_than(
    name: str, demo_model_path: Path, exact: float
) -> None:
    formats, percent = LIMITS[name]
    assert demo_perplexity(demo_model_path, **formats) <= exact * (1 + percent / 100)
