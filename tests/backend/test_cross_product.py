"""Every feature beside every other, on real attention: what one request says never depends on how it was run."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import numpy as np
import pytest

from backend.engine.engine import LLMEngine
from backend.engine.grammar import CompiledGrammar, GrammarCompiler
from backend.engine.grammar_spec import GrammarSpec
from backend.engine.params import GenerationRequest, StepOutput
from tests.backend.pairwise import Row, full_product, pairs, pairwise
from tests.backend.real_engine import (
    HAS_NATIVE,
    AsciiTokenizer,
    family_engine,
    llama_engine,
    loaded,
)
from tests.backend.toy_model import request, run

pytestmark = pytest.mark.usefixtures("one_thread")
WIDE = 64  # blocks of 16 tokens
TIGHT = 7  # for seven requests that need three or four each
TIGHT_BY_WINDOW = 5  # where blocks behind the window of every layer are given back
FAMILIES = ["mistral", "gemma3", "qwen3_moe"]  # windows, windows beside none, experts
AXES: dict[str, list[Any]] = {
    "model": [
        *["llama", "llama kv8"],
        *(["llama native w4", "llama native exact", "llama native kv8"] if HAS_NATIVE else []),
        *FAMILIES,
    ],
    "prefix_cache": [True, False],
    "budget": [7, 24, 512],
    "pool": ["tight", "wide"],
    "speculation": ["off", "ngram", "draft"],
    "batch": [1, 7],
    "grammar": [False, True],
}
SCHEMA = {
    "type": "array",
    "items": {"enum": ["red", "green", 12, True]},
    "minItems": 6,
    "maxItems": 6,
}


@cache
def grammar(is_llama: bool) -> CompiledGrammar:
    spec = GrammarSpec("json_schema", json.dumps(SCHEMA))
    return GrammarCompiler(loaded().tokenizer if is_llama else AsciiTokenizer()).compile(spec)


def requests(model: str, with_grammar: bool) -> list[GenerationRequest]:
    """Greedy and seeded in turn; some prompts share a prefix, some repeat themselves, some are penalized."""
    shared = [3 + (7 * i) % 90 for i in range(32)]
    prompts = [
        shared,
        [*shared, 9, 9],
        [40, 41, 42, 43] * 6,
        [5],
        [*shared[:20], *[8, 7] * 6],
        [*shared, 11],
        [60] * 17,
    ]
    items = [
        request(
            str(i),
            prompt,
            temperature=0.8 * (i % 2),
            seed=i,
            max_tokens=14 + 3 * i,
            logprobs=2,
            frequency_penalty=[0.0, -0.4, 0.6][i % 3],
        )
        for i, prompt in enumerate(prompts)
    ]
    for item in items:
        item.grammar = grammar(model not in FAMILIES).start() if with_grammar else None
    return items


def engine_of(model: str, *, drafts: bool = False, **config: Any) -> LLMEngine:
    if model in FAMILIES:
        return family_engine(model, own_draft=drafts, **config)
    exact = {"deterministic": True} if "exact" in model else {}
    tier = "native" if "native" in model else "portable"
    quantization = "w4" if "w4" in model else "auto"
    return llama_engine(
        tier,
        draft_seed=0 if drafts else None,
        quantization=quantization,
        kv_cache_dtype="int8" if "kv8" in model else "auto",
        **exact,
        **config,
    )


@cache
def expected(model: str, with_grammar: bool) -> dict[str, StepOutput]:
    """Each alone, cold, with nothing on."""
    return {
        item.request_id: run(engine_of(model), item)[item.request_id]
        for item in requests(model, with_grammar)
    }


def blocks_of(row: Row) -> int:
    if row["pool"] == "wide":
        return WIDE
    return TIGHT_BY_WINDOW if row["model"] == "mistral" else TIGHT


def check(row: Row) -> None:
    engine = engine_of(
        row["model"],
        drafts=row["speculation"] == "draft",
        speculative="ngram" if row["speculation"] == "ngram" else "off",
        enable_prefix_cache=row["prefix_cache"],
        max_num_batched_tokens=row["budget"],
        num_blocks=blocks_of(row),
    )
    items = requests(row["model"], row["grammar"])
    outputs: dict[str, StepOutput] = {}
    for start in range(0, len(items), row["batch"]):
        outputs |= run(engine, *items[start : start + row["batch"]])
    for key, want in expected(row["model"], row["grammar"]).items():
        out = outputs[key]
        assert (out.token_ids, out.text) == (want.token_ids, want.text)
        assert (out.finish_reason, out.num_output_tokens) == (
            want.finish_reason,
            want.num_output_tokens,
        )
        got, true = ([e.logprob for e in side.logprobs] for side in (out, want))
        assert np.allclose(got, true, rtol=0, atol=0 if "exact" in row["model"] else 1e-3)
    stats = engine.stats()
    if (row["pool"], row["batch"], row["budget"]) == ("tight", 7, 512):
        assert stats.num_preemptions > 0
    if row["prefix_cache"] and row["pool"] == "wide":
        assert stats.num_cached_tokens > 0
    if row["speculation"] == "draft" and row["budget"] > 7 and not row["grammar"]:
        assert stats.num_accepted_tokens > 0


def test_the_subset_holds_every_pair_of_values() -> None:
    rows = pairwise(AXES)
    whole = set().union(*(pairs(row) for row in full_product(AXES)))
    assert set().union(*map(pairs, rows)) == whole
    sizes = sorted(map(len, AXES.values()))
    assert (
        len(rows) < 4 / 3 * sizes[-1] * sizes[-2]
    )  # no subset is smaller than the two largest axes


@pytest.mark.parametrize("row", pairwise(AXES), ids=lambda row: " ".join(map(str, row.values())))
def test_any_two_features_together_change_nothing(row: Row) -> None:
    check(row)


@pytest.mark.exhaustive
@pytest.mark.parametrize("row", full_product(AXES), ids=lambda r: " ".join(map(str, r.values())))
def test_all_features_together_change_nothing(row: Row) -> None:
    check(row)
