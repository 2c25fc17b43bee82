"""Blocks behind a model's sliding window go back to the pool, and no text changes for it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from backend.engine.params import StepOutput
from backend.models.batch import Batch, KVCache
from tests.backend.tiny_families import model
from tests.backend.toy_model import ToyModel, ToyTokenizer, new_engine, request, run

pytestmark = pytest.mark.usefixtures("one_thread")


WINDOW = 10  # tokens; blocks have 4


class WatchedWindow(ToyModel):
    """Keeps the longest part of a block table that is not the null block, and what the null block holds."""

    def __init__(self) -> None:
        super().__init__(window=WINDOW)
        self.most_blocks = 0

    def forward(self, batch: Batch, kv: KVCache) -> Tensor:
        null = kv.num_blocks - 1
        for table, context_len in zip(batch.block_tables.tolist(), batch.context_lens, strict=True):
            used = table[: -(-context_len // kv.block_size)]
            self.most_blocks = max(self.most_blocks, sum(block != null for block in used))
        assert all(not layer[:, null].any() for layer in (*kv.keys, *kv.values))
        return super().forward(batch, kv)


def whole(outputs: dict[str, StepOutput]) -> dict[str, list[int]]:
    return {name: out.token_ids for name, out in outputs.items()}


def reference(prompt: list[int], max_tokens: int) -> list[int]:
    """Greedy tokens of the windowed model over plain consecutive blocks, computed from the start for each token."""
    toy, ids = ToyModel(window=WINDOW), list(prompt)
    kv = toy.new_kv_cache(64, 4)
    for _ in range(max_tokens):
        n = len(ids)
        positions = torch.arange(n)
        tables = torch.arange(64, dtype=torch.int32).unsqueeze(0)
        last = torch.tensor([n - 1])
        batch = Batch(torch.tensor(ids), positions, positions, [0, n], [n], tables, last)
        ids.append(int(toy.forward(batch, kv)[0].argmax()))
    return ids[len(prompt) :]


PROMPT = [(7 * i) % 60 + 1 for i in range(37)]


@pytest.mark.parametrize("budget", [3, 16, 512])
def test_freed_blocks_change_no_token(budget: int):
    engine = new_engine(ToyModel(window=WINDOW), max_num_batched_tokens=budget)
    output = run(engine, request("a", PROMPT, max_tokens=30))["a"]
    assert output.token_ids == reference(PROMPT, 30)


def test_while_it_decodes_a_request_keeps_only_the_blocks_of_its_window():
    watched = WatchedWindow()
    engine = new_engine(watched, max_num_batched_tokens=4)
    engine.add(request("a", PROMPT[:4], max_tokens=60))
    while engine.has_work:
        engine.step()
    assert watched.most_blocks == 4  # ten tokens lie in four blocks at most


def test_many_long_answers_run_where_the_pool_holds_their_windows_only():
    engine = new_engine(ToyModel(window=WINDOW), num_blocks=24)
    outputs = run(engine, *[request(str(i), PROMPT[i : i + 4], max_tokens=60) for i in range(4)])
    assert {out.num_output_tokens for out in outputs.values()} == {60}
    assert engine.stats().num_preemptions == 0  # whole contexts would take 64 blocks


def test_a_hit_needs_only_the_window_and_gives_the_same_text():
    watched = WatchedWindow()
    engine = new_engine(watched, num_blocks=40)
    cold = run(engine, request("cold", PROMPT))["cold"]
    warm = run(engine, request("warm", PROMPT))["warm"]
    assert warm.token_ids == cold.token_ids
    assert warm.num_cached_tokens == 36
    assert engine.stats().num_free_blocks == 40


def test_a_hit_is_found_after_the_front_of_the_prompt_was_evicted():
    engine = new_engine(ToyModel(window=WINDOW), num_blocks=16)
    cold = run(engine, request("cold", PROMPT, max_tokens=2))["cold"]
    run(engine, request("other", [9] * 35, max_tokens=2))
    warm = run(engine, request("warm", PROMPT, max_tokens=2))["warm"]
    assert engine.stats().num_evictions > 0
    assert warm.num_cached_tokens == 36
    assert warm.token_ids == cold.token_ids


def test_preemption_behind_a_window_changes_no_text():
    prompts = [PROMPT[i : i + 2] for i in range(6)]
    requests = [request(str(i), ids, max_tokens=24) for i, ids in enumerate(prompts)]
    engine = new_engine(ToyModel(window=WINDOW), num_blocks=13)
    outputs = whole(run(engine, *requests))
    assert engine.stats().num_preemptions > 0
    assert outputs == {str(i): reference(ids, 24) for i, ids in enumerate(prompts)}


def test_an_abort_behind_a_window_frees_every_block():
    engine = new_engine(ToyModel(window=WINDOW))
    engine.add(request("a", PROMPT, max_tokens=30))
    for _ in range(5):
        engine.step()
    engine.abort("a")
    assert engine.stats().num_free_blocks == engine.stats().num_blocks


def test_guesses_behind_a_window_change_no_text():
    engine = new_engine(ToyModel(window=WINDOW), speculative="ngram")
    prompt = [1, 2, 3, 4, 5] * 6
    assert run(engine, request("a", prompt, max_tokens=30))["a"].token_ids == reference(prompt, 30)


def test_with_a_draft_model_blocks_stay_for_it():
    engine = new_engine(ToyModel(window=WINDOW), draft_model=ToyModel(seed=3))
    out = run(engine, request("a", PROMPT, max_tokens=30))["a"]
    assert out.token_ids == reference(PROMPT, 30)


@pytest.mark.parametrize("family", ["mistral", "qwen3_moe_mixed"])
def test_a_windowed_family_says_the_same_whether_its_blocks_are_freed_or_kept(family: str):
    tokenizer = ToyTokenizer([bytes([65 + i % 26]) for i in range(96)])
    requests = [request(str(i), PROMPT[i : i + 9 + i], max_tokens=24) for i in range(5)]
    freed = run(new_engine(model(family), tokenizer, num_blocks=20), *requests)
    keeping = model(family)
    keeping.window = None
    assert whole(freed) == whole(run(new_engine(keeping, tokenizer), *requests))
