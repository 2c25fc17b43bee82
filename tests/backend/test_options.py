from __future__ import annotations

from typing import Any

import pytest

from backend.engine.config import EngineConfig
from backend.options import EngineOptions, option_faults, parse_options


def test_an_empty_table_is_every_default() -> None:
    assert option_faults({}) == []
    assert parse_options({}) == EngineOptions()


def test_the_defaults_are_the_engines_own() -> None:
    assert EngineOptions().engine_config() == EngineConfig()


def test_values_reach_the_engine() -> None:
    table = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "kv_cache_gb": 1, "num_blocks": 9}
    config = parse_options({**table, "max_model_len": 100}).engine_config()
    assert config == EngineConfig(
        max_num_seqs=8,
        max_num_batched_tokens=64,
        kv_cache_gb=1.0,
        num_blocks=9,
        max_model_len=100,
    )


def test_deterministic_reaches_the_engine() -> None:
    assert parse_options({"deterministic": True}).engine_config() == EngineConfig(
        deterministic=True
    )


@pytest.mark.parametrize(
    ("value", "drafter", "draft_path", "head_path"),
    [
        ("off", "off", "", ""),
        ("ngram", "ngram", "", ""),
        ("auto", "ngram", "", ""),
        ("draft:models/small.gguf", "off", "models/small.gguf", ""),
        ("head:heads/a", "off", "", "heads/a"),
    ],
)
def test_who_guesses_is_chosen_by_name(
    value: str, drafter: str, draft_path: str, head_path: str
) -> None:
    options = parse_options({"speculative": value})
    assert option_faults({"speculative": value}) == []
    assert (options.engine_config().speculative, options.draft_path) == (drafter, draft_path)
    assert options.head_path == head_path


def test_an_unknown_key_is_refused_with_the_nearest_one() -> None:
    assert option_faults({"max_num_seq": 1}) == [
        "engine.max_num_seq: unknown key; nearest: max_num_seqs"
    ]


@pytest.mark.parametrize(
    ("key", "value", "choices"),
    [
        ("quantization", "w3", '"auto" or "none" or "w8" or "w4" or "w8a8"'),
        ("speculative", "ngrams", '"off" or "auto" or "ngram" or "draft:PATH" or "head:PATH"'),
    ],
)
def test_a_key_of_a_few_words_tells_them(key: str, value: str, choices: str) -> None:
    assert option_faults({key: value}) == [f"engine.{key}: must be {choices}, got {value!r}"]


def test_each_fault_has_a_line() -> None:
    assert len(option_faults({"dtpe": "x", "replicas": 0, "threads": "2"})) == 3


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("dtype", "float8"),
        ("quantization", "q3"),
        ("activations", "int4"),
        ("max_model_len", 1),
        ("max_model_len", 10.5),
        ("max_num_seqs", 0),
        ("max_num_batched_tokens", True),
        ("kv_cache_gb", 0),
        ("kv_cache_gb", float("nan")),
        ("kv_cache_gb", float("inf")),
        ("kv_cache_gb", "1"),
        ("replicas", 0),
        ("replicas", 1000),
        ("threads", -1),
        ("deterministic", "yes"),
        ("num_blocks", 0),
        ("speculative", "medusa"),
        ("speculative", "draft:"),
        ("speculative", "head:"),
    ],
)
def test_a_value_out_of_range_is_refused_by_its_key(key: str, value: Any) -> None:
    (fault,) = option_faults({key: value})
    assert fault.startswith(f"engine.{key}: ")
    assert repr(value) in fault


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("device", "cuda", "only the CPU engine is built so far"),
        ("gpu_memory_utilization", 0.9, "use kv_cache_gb"),
        ("tensor_parallel_size", 2, "not built yet"),
    ],
)
def test_what_is_not_built_is_said_and_never_ignored(key: str, value: Any, sentence: str) -> None:
    (fault,) = option_faults({key: value})
    assert fault.startswith(f"engine.{key}: ")
    assert sentence in fault


def test_the_one_value_of_an_unbuilt_key_that_works_is_taken() -> None:
    table = {"device": "cpu", "speculative": "off", "tensor_parallel_size": 1}
    assert option_faults({**table, "kv_cache_dtype": "int8"}) == []
