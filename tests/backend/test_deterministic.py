"""`deterministic = true`: the numbers behind an answer are the same, bit for bit, however its prompt was computed."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.cpu import native
from backend.engine.config import EngineConfig
from backend.engine.engine import LLMEngine
from backend.engine.params import GenerationRequest, RequestClass, StepOutput, TokenLogprob
from backend.models.loader import LoadedModel, load_model
from backend.options import EngineOptions, WorkerSettings
from backend.worker import LoadFault, load_engine
from tests.backend import tiny_llama
from tests.backend.toy_model import ToyModel, new_engine, request, run

pytestmark = pytest.mark.skipif(
    native.native_available() is not None, reason="the native tier cannot be built here"
)
Numbers = list[TokenLogprob]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    path: Path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    tiny_llama.write_gguf(path, tiny_llama.tensors())
    return load_model(path, dtype="float32", threads=1)


def engine(loaded: LoadedModel, **config: object) -> LLMEngine:
    limits = {"num_blocks": 64, "deterministic": True, **config}
    return LLMEngine(
        loaded.model,
        loaded.tokenizer,
        EngineConfig(**limits),  # pyright: ignore[reportArgumentType]
        clock=lambda: 0.0,
    )


def asked(
    name: str, prompt: list[int], klass: RequestClass = RequestClass.STANDARD
) -> GenerationRequest:
    return request(name, prompt, klass, max_tokens=6, logprobs=20)


def numbers(output: StepOutput) -> tuple[list[int], Numbers]:
    return output.token_ids, output.logprobs


def prompt_of(loaded: LoadedModel, length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, loaded.tokenizer.vocab_size) for _ in range(length)]


def cold(loaded: LoadedModel, prompt: list[int]) -> tuple[list[int], Numbers]:
    return numbers(run(engine(loaded), asked("cold", prompt))["cold"])


def test_a_hit_has_the_bits_of_the_cold_run(loaded: LoadedModel):
    prompt, running = prompt_of(loaded, 75), engine(loaded)
    first = run(running, asked("first", prompt))["first"]
    second = run(running, asked("second", prompt))["second"]
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 64)
    assert numbers(first) == numbers(second)


@pytest.mark.parametrize("budget", [1, 7, 16, 33])
def test_chunks_have_the_bits_of_one_pass(loaded: LoadedModel, budget: int):
    prompt = prompt_of(loaded, 75)
    chunked = run(engine(loaded, max_num_batched_tokens=budget), asked("a", prompt))["a"]
    assert numbers(chunked) == cold(loaded, prompt)


def test_forty_neighbours_change_no_bit(loaded: LoadedModel):
    prompt = prompt_of(loaded, 40)
    neighbours = [asked(str(i), prompt_of(loaded, 1 + i, seed=i)) for i in range(40)]
    together = run(engine(loaded, num_blocks=256), *neighbours, asked("a", prompt))["a"]
    assert numbers(together) == cold(loaded, prompt)


def test_guesses_change_no_bit(loaded: LoadedModel):
    item = request("a", prompt_of(loaded, 6) * 5, max_tokens=40, logprobs=20)
    guessed = run(engine(loaded, speculative="ngram"), item)["a"]
    assert guessed.num_draft_tokens > 0
    assert numbers(guessed) == numbers(run(engine(loaded), item)["a"])


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_no_history_changes_a_bit(loaded: LoadedModel, data: st.DataObject):
    """Hits on any part of the prompt, chunks, neighbours and preemption, all at once."""
    prompt = prompt_of(loaded, data.draw(st.integers(1, 60)), seed=7)
    running = engine(
        loaded,
        num_blocks=data.draw(st.integers(6, 12)),
        max_num_batched_tokens=data.draw(st.sampled_from([3, 16, 50, 512])),
        max_num_seqs=data.draw(st.integers(1, 6)),
        max_model_len=80,
    )
    lengths = data.draw(st.lists(st.integers(1, 60), max_size=5))
    others = [
        asked(f"other {i}", [*prompt[:length], *prompt_of(loaded, 5, seed=i)], klass)
        for i, length in enumerate(lengths)
        for klass in [RequestClass(data.draw(st.integers(0, 3)))]
    ]
    outputs = run(running, *others, asked("a", prompt))
    again = run(running, asked("again", prompt))["again"]
    assert numbers(outputs["a"]) == numbers(again) == cold(loaded, prompt)


def test_a_worker_of_a_model_that_cannot_ends_with_one_line(tmp_path: Path):
    folder = tiny_llama.write_folder(tmp_path / "tiny", tiny_llama.tensors())
    options = EngineOptions(dtype="bfloat16", num_blocks=8, deterministic=True)
    with pytest.raises(LoadFault, match=r"^deterministic: ") as caught:
        load_engine(WorkerSettings("local/0", "", str(folder), "", options=options))
    assert "\n" not in str(caught.value)


def test_a_model_that_cannot_is_refused_in_one_sentence():
    with pytest.raises(ValueError, match=r"^deterministic: .* takes the native tier") as caught:
        new_engine(ToyModel(), deterministic=True)
    assert "\n" not in str(caught.value)
