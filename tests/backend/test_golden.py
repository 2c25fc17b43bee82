"""Greedy text of the demo model against transformers in float32 on the same weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from backend.models.batch import KVCache, Model
from backend.models.loader import LoadedModel, load_model
from tests.backend.tiny_llama import step

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

GOLDEN = json.loads(
    (Path(__file__).with_name("data") / "golden_smollm2_f32.json").read_text(encoding="utf-8")
)
CASES: list[dict[str, Any]] = GOLDEN["cases"]
BLOCK_SIZE = 16
MAX_LOGPROB_ERROR = 1e-3


@pytest.fixture(scope="module", params=["portable", "native"])
def loaded(request: pytest.FixtureRequest, demo_model_path: Path) -> Iterator[LoadedModel]:
    """On one thread: two that share busy cores wait for each other at every operator."""
    before = torch.get_num_threads()
    wants_native = request.param == "native"
    model = load_model(demo_model_path, dtype="float32", threads=1, native=wants_native)
    if wants_native and type(model.model).__name__ != "NativeLlama":
        pytest.skip("no native tier on this machine")
    yield model
    torch.set_num_threads(before)


def test_every_prompt_gets_the_ids_of_the_original(loaded: LoadedModel) -> None:
    assert loaded.chat_template is not None
    for case in CASES:
        text = loaded.chat_template.render(case["messages"], None)
        assert loaded.tokenizer.encode(text) == case["prompt_ids"]


def test_every_output_decodes_to_the_text_of_the_original(loaded: LoadedModel) -> None:
    for case in CASES:
        assert loaded.tokenizer.decode(case["output_ids"]) == case["text"]


def test_greedy_tokens_and_their_logprobs_are_those_of_the_original(loaded: LoadedModel) -> None:
    """All prompts decode side by side, each fed the original's tokens, so that one difference cannot breed others."""
    found = replay(loaded.model, CASES)
    worst = 0.0
    exact = 0
    for case, rows in zip(CASES, found, strict=True):
        for logprobs, top5 in zip(rows, case["top5"], strict=True):
            for token, wanted in top5:
                worst = max(worst, abs(float(logprobs[token]) - wanted))
        exact += [int(row.argmax()) for row in rows] == case["output_ids"]
    assert worst < MAX_LOGPROB_ERROR
    assert exact == len(CASES)


@pytest.mark.slow
def test_rounded_activations_choose_the_original_token_nearly_always(demo_model_path: Path) -> None:
    model = load_model(demo_model_path, threads=1, activations="int8").model
    found = replay(model, CASES)
    chosen = [[int(row.argmax()) for row in rows] for rows in found]
    pairs = [
        pair
        for ids, case in zip(chosen, CASES, strict=True)
        for pair in zip(ids, case["output_ids"], strict=True)
    ]
    assert sum(ours == original for ours, original in pairs) >= 0.96 * len(pairs)


def replay(model: Model, cases: list[dict[str, Any]]) -> list[list[torch.Tensor]]:
    """Log-probabilities before each output token of each case."""
    longest = max(len(case["prompt_ids"]) + len(case["output_ids"]) for case in cases)
    blocks_each = -(-longest // BLOCK_SIZE)
    kv = model.new_kv_cache(blocks_each * len(cases), BLOCK_SIZE)
    tables = [list(range(i * blocks_each, (i + 1) * blocks_each)) for i in range(len(cases))]
    found: list[list[torch.Tensor]] = [
        [prefill(model, kv, case["prompt_ids"], table)]
        for case, table in zip(cases, tables, strict=True)
    ]
    for at in range(max(len(case["output_ids"]) for case in cases) - 1):
        live = [i for i, case in enumerate(cases) if at + 1 < len(case["output_ids"])]
        rows = [[cases[i]["output_ids"][at]] for i in live]
        contexts = [len(cases[i]["prompt_ids"]) + at + 1 for i in live]
        logits = step(model, kv, rows, contexts, [tables[i] for i in live])
        for i, logprobs in zip(live, torch.log_softmax(logits, -1), strict=True):
            found[i].append(logprobs)
    return found


def prefill(model: Model, kv: KVCache, ids: list[int], table: list[int]) -> torch.Tensor:
    return torch.log_softmax(step(model, kv, [ids], [len(ids)], [table])[0], -1)
