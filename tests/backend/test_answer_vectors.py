from __future__ import annotations

import pytest

from backend.answer_vectors import EmbeddingsAnswer
from backend.protocol import Accepted, Delta, Ready, Rejected
from plugins.errors import ContextLengthExceeded, UpstreamError
from plugins.events import Embedding, Finished, Request, Started, Usage

READY = Ready("m", "f", 100, 10, 1)
FIRST, SECOND = Embedding.of([1.0, 0.0], 0), Embedding.of([0.0, 1.0], 1)


def answer(num_inputs: int = 2) -> EmbeddingsAnswer:
    return EmbeddingsAnswer(Request("r", "embeddings", "m", prompts=["x"] * num_inputs), "m", READY)


def delta(vector: Embedding) -> Delta:
    return Delta(1, vector.index, "", 0, 0, finish_reason="stop", embedding=vector.data)


def test_vectors_pass_on_as_they_are_done_and_the_last_one_ends_the_answer() -> None:
    found = answer()
    started, second = found.read([Accepted(1, 7), delta(SECOND)])
    assert isinstance(started, Started)
    assert (second, found.done) == (SECOND, False)
    assert found.read([delta(FIRST)]) == [FIRST, Finished("stop"), Usage(prompt_tokens=7)]
    assert found.done


def test_a_fault_of_the_engine_ends_the_answer() -> None:
    failed = Delta(1, 0, "", 0, 0, finish_reason="error", error="the model failed")
    with pytest.raises(UpstreamError, match="the model failed"):
        answer().read([Accepted(1, 7), failed])


def test_a_refusal_is_the_clients_error() -> None:
    found = answer()
    with pytest.raises(ContextLengthExceeded) as caught:
        found.read([Rejected(1, "too long", "input[1]", "context_length_exceeded")])
    assert (caught.value.param, found.done) == ("input[1]", True)
