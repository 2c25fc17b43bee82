"""Vectors from the engine: whatever chunks, neighbours and preemption do, that of the whole prompt alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from backend.cpu import native
from backend.engine.config import EngineConfig
from backend.engine.engine import InvalidGeneration, LLMEngine
from backend.engine.params import (
    EmbeddingParams,
    GenerationRequest,
    RequestClass,
    SamplingParams,
    StepOutput,
)
from backend.engine.pooling import Pooler
from backend.models.batch import Batch, KVCache
from backend.models.loader import load_model
from tests.backend import tiny_llama
from tests.backend.toy_model import ToyModel, new_engine, request, run

PROMPTS = [[1 + (7 * i + k) % 60 for k in range(n)] for i, n in enumerate([1, 2, 9, 16, 33])]


def embed(
    request_id: str, ids: list[int], dimensions: int | None = None, **fields: object
) -> GenerationRequest:
    return GenerationRequest(
        request_id, list(ids), SamplingParams(), embedding=EmbeddingParams(dimensions), **fields
    )  # type: ignore[arg-type]


def vector(output: StepOutput) -> np.ndarray:
    assert output.finish_reason == "stop"
    assert (output.text, output.token_ids, output.num_output_tokens) == ("", [], 0)
    return np.frombuffer(output.embedding, "<f4")


def hidden_of(ids: list[int]) -> Tensor:
    """The toy's hidden states of a prompt that is alone in its cache. [num_tokens, hidden_size]"""
    model = ToyModel()
    kv = model.new_kv_cache(64, 4)
    batch = tiny_llama.make_batch(kv, [ids], [len(ids)], [list(range(64))])
    batch.logits_rows = torch.arange(len(ids))
    return model.hidden_states(batch, kv)


def reference(ids: list[int], pooling: str = "mean", dimensions: int | None = None) -> np.ndarray:
    hidden = hidden_of(ids)
    pooled = (hidden.mean(0) if pooling == "mean" else hidden[-1])[:dimensions]
    return (pooled / pooled.norm()).float().numpy()


def vectors(engine: LLMEngine, prompts: list[list[int]] = PROMPTS) -> list[np.ndarray]:
    outputs = run(engine, *(embed(str(i), ids) for i, ids in enumerate(prompts)))
    return [vector(outputs[str(i)]) for i in range(len(prompts))]


@pytest.mark.parametrize("pooling", ["mean", "last"])
@pytest.mark.parametrize("num_batched_tokens", [1, 3, 7, 512])
def test_a_vector_is_the_pooled_hidden_states_whatever_the_chunks(
    pooling: str, num_batched_tokens: int
) -> None:
    engine = new_engine(pooling=pooling, max_num_batched_tokens=num_batched_tokens)
    for ids, got in zip(PROMPTS, vectors(engine), strict=True):
        np.testing.assert_allclose(got, reference(ids, pooling), atol=1e-6)
        assert got.dtype == np.float32
        assert np.linalg.norm(got) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_preemption_in_the_middle_of_a_prompt_does_not_show(pooling: str) -> None:
    """Blocks for the long text alone: chats of a better class take them while it is half done."""
    engine = new_engine(pooling=pooling, num_blocks=10, max_num_batched_tokens=5)
    long_text = PROMPTS[4]
    engine.add(embed("v", long_text, klass=RequestClass.BATCH))
    outputs = engine.step() + engine.step()
    outputs += list(run(engine, request("chat", PROMPTS[3])).values())
    assert engine.stats().num_preemptions == 1
    (got,) = [output for output in outputs if output.request_id == "v"]
    np.testing.assert_allclose(vector(got), reference(long_text, pooling), atol=1e-6)


def test_beside_chats_both_answer_as_if_alone() -> None:
    chats = [request(f"c{i}", ids) for i, ids in enumerate(PROMPTS)]
    alone = {chat.request_id: run(new_engine(), chat)[chat.request_id].text for chat in chats}
    engine = new_engine(max_num_batched_tokens=8, speculative="ngram")
    mixed = [
        item for i, chat in enumerate(chats) for item in (chat, embed(f"v{i}", PROMPTS[-1 - i]))
    ]
    outputs = run(engine, *mixed)
    assert {i: outputs[i].text for i in alone} == alone
    for i in range(len(chats)):
        wanted = reference(PROMPTS[-1 - i])
        np.testing.assert_allclose(vector(outputs[f"v{i}"]), wanted, atol=1e-6)


def test_one_step_computes_vectors_and_tokens_together() -> None:
    model = ToyModel()
    engine = new_engine(model)
    engine.add(request("c", PROMPTS[2]))
    engine.add(embed("v", PROMPTS[3]))
    outputs = engine.step()
    assert [output.request_id for output in outputs] == ["c", "v"]
    assert model.num_tokens_seen == [len(PROMPTS[2]) + len(PROMPTS[3])]


def test_a_text_that_was_chatted_about_is_computed_whole() -> None:
    engine = new_engine()
    run(engine, request("c", PROMPTS[4]))
    output = run(engine, embed("v", PROMPTS[4]))["v"]
    np.testing.assert_allclose(vector(output), reference(PROMPTS[4]), atol=1e-6)
    assert output.num_cached_tokens == 0


def test_texts_leave_nothing_in_the_prefix_cache_and_push_nothing_out() -> None:
    engine = new_engine(num_blocks=24, max_num_seqs=2)
    run(engine, request("c", PROMPTS[4]))
    run(engine, *(embed(f"v{i}", [(i + k) % 60 + 1 for k in range(20)]) for i in range(12)))
    again = run(engine, request("c2", PROMPTS[4]), request("v", [k % 60 + 1 for k in range(20)]))
    assert again["c2"].num_cached_tokens == 32
    assert again["v"].num_cached_tokens == 0


def test_an_abort_in_the_middle_frees_every_block() -> None:
    engine = new_engine(max_num_batched_tokens=4)
    engine.add(embed("v", PROMPTS[4]))
    assert engine.step() == []
    engine.abort("v")
    stats = engine.stats()
    assert (stats.num_free_blocks, stats.num_running, engine.has_work) == (256, 0, False)


def test_fewer_dimensions_are_the_first_ones_of_length_one() -> None:
    output = run(new_engine(), embed("v", PROMPTS[3], 5))["v"]
    wanted = reference(PROMPTS[3], dimensions=5)
    np.testing.assert_allclose(vector(output), wanted, atol=1e-6)
    assert len(wanted) == 5


@pytest.mark.parametrize(
    ("ids", "dimensions", "param", "code", "words"),
    [
        ([1], 17, "dimensions", "invalid_value", "between 1 and 16, got 17"),
        ([1], 0, "dimensions", "invalid_value", "between 1 and 16, got 0"),
        ([], None, "input", "invalid_value", "empty"),
        ([1] * 513, None, "input", "context_length_exceeded", "512 tokens; the input has 513"),
        ([64], None, "input", "invalid_value", "token id 64"),
    ],
)
def test_what_could_never_become_a_vector_is_refused_with_the_limit(
    ids: list[int], dimensions: int | None, param: str, code: str, words: str
) -> None:
    engine = new_engine()
    with pytest.raises(InvalidGeneration, match=words) as caught:
        engine.add(embed("v", ids, dimensions))
    assert (caught.value.param, caught.value.code, engine.has_work) == (param, code, False)


def test_a_text_may_fill_the_whole_context() -> None:
    engine = new_engine(max_model_len=33)
    assert len(vectors(engine, [PROMPTS[4]])[0]) == 16


class NanModel(ToyModel):
    def hidden_states(self, batch: Batch, kv: KVCache) -> Tensor:
        hidden = super().hidden_states(batch, kv)
        hidden[:, 3] = torch.nan
        return hidden


def test_hidden_states_that_are_not_numbers_end_the_request_with_an_error() -> None:
    output = run(new_engine(NanModel()), embed("v", PROMPTS[2]))["v"]
    assert (output.finish_reason, output.embedding) == ("error", b"")
    assert "not numbers" in output.error


def test_prompt_tokens_are_counted_and_output_is_none() -> None:
    engine = new_engine()
    output = run(engine, embed("v", PROMPTS[3]))["v"]
    stats = engine.stats()
    assert (output.num_prompt_tokens, stats.num_prompt_tokens, stats.num_output_tokens) == (
        16,
        16,
        0,
    )


def test_a_chunk_that_is_computed_again_counts_once() -> None:
    pooler = Pooler("mean", 4, 2)
    hidden = np.array([[1, 0], [0, 1], [3, 0], [0, 3]], np.float32)
    pooler.add(hidden[:2])
    assert pooler.num_wanted(0, 3) == 1
    pooler.add(hidden[2:3])
    assert pooler.num_wanted(0, 3) == 0
    pooler.add(hidden[3:])
    whole = pooler.vector()
    assert whole is not None
    np.testing.assert_allclose(whole, [2**-0.5, 2**-0.5])


@settings(max_examples=10)
@given(st.data())
def test_whatever_arrives_and_leaves_vectors_are_those_of_each_text_alone(
    data: st.DataObject,
) -> None:
    engine = new_engine(
        num_blocks=data.draw(st.integers(12, 20)),
        max_num_batched_tokens=data.draw(st.integers(2, 20)),
        max_num_seqs=data.draw(st.integers(1, 4)),
    )
    waiting = data.draw(
        st.lists(st.tuples(st.integers(0, 4), st.booleans(), st.booleans()), max_size=8)
    )
    texts: dict[str, list[int]] = {}
    outputs: list[StepOutput] = []
    while waiting or engine.has_work:
        if waiting and data.draw(st.booleans()):
            which, is_chat, urgent = waiting.pop()
            klass = RequestClass.INTERACTIVE if urgent else RequestClass.BATCH
            request_id = f"{len(texts)}"
            texts[request_id] = [] if is_chat else PROMPTS[which]
            ask = request if is_chat else embed
            engine.add(ask(request_id, PROMPTS[which], klass=klass))
        elif texts and data.draw(st.integers(0, 9)) == 0:
            left = data.draw(st.sampled_from(sorted(texts)))
            engine.abort(left)
            texts[left] = []
        outputs += engine.step()
    assert engine.stats().num_free_blocks == engine.stats().num_blocks
    found = {output.request_id: output for output in outputs}
    for request_id, ids in texts.items():
        if ids:
            np.testing.assert_allclose(vector(found[request_id]), reference(ids), atol=1e-6)


# -- Real models ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pooling", ["mean", "last"])
@pytest.mark.parametrize("on_native", [False, True], ids=["portable", "native"])
def test_a_tiny_llamas_vector_equals_the_plain_reference(
    tmp_path: Path, pooling: str, on_native: bool
) -> None:
    if on_native and (why := native.native_available()):
        pytest.skip(why)
    weights = tiny_llama.tensors()
    loaded = load_model(
        tiny_llama.write_folder(tmp_path / "tiny", weights),
        dtype="float32",
        threads=1,
        native=on_native,
    )
    config = EngineConfig(num_blocks=16, max_num_batched_tokens=7, pooling=pooling)  # type: ignore[arg-type]
    engine = LLMEngine(loaded.model, loaded.tokenizer, config)
    ids = [3, 40, 41, 200, 7, 7, 99, 150, 31, 12, 64, 5, 77, 180, 21, 90, 33, 34, 35]
    got = vector(run(engine, embed("v", ids))["v"])
    hidden = tiny_llama.dense_hidden(weights, ids)
    pooled = hidden.mean(0) if pooling == "mean" else hidden[-1]
    np.testing.assert_allclose(got, pooled / pooled.norm(), atol=1e-4)
