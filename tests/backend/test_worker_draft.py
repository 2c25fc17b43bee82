"""The worker's loading of a draft model, on tiny checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from backend.engine.params import GenerationRequest, SamplingParams, StepOutput
from backend.options import EngineOptions, WorkerSettings
from backend.worker import LoadFault, load_engine
from tests.backend import tiny_llama
from tests.backend.toy_model import joined

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama.write_folder(tmp_path_factory.mktemp("m") / "tiny", tiny_llama.tensors())


def settings(folder: Path, speculative: str) -> WorkerSettings:
    options = EngineOptions(dtype="float32", num_blocks=64, speculative=speculative)
    return WorkerSettings("local/0", "", str(folder), "", options=options)


def answer(folder: Path, speculative: str) -> StepOutput:
    engine = load_engine(settings(folder, speculative), clock=lambda: 0.0).engine
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    engine.add(GenerationRequest("a", [3, 40, 41, 200, 7, 99], params))
    outputs: list[StepOutput] = []
    while engine.has_work:
        outputs += engine.step()
    return joined(outputs)["a"]


def test_a_draft_model_guesses_for_the_model(folder: Path) -> None:
    plain, drafted = answer(folder, "off"), answer(folder, f"draft:{folder}")
    assert drafted.token_ids == plain.token_ids
    assert drafted.num_accepted_tokens == drafted.num_draft_tokens > 10  # it is the model itself


def test_ngrams_leave_the_text_alone(folder: Path) -> None:
    assert answer(folder, "ngram").token_ids == answer(folder, "off").token_ids


def test_a_draft_model_with_another_tokenizer_is_refused(folder: Path, tmp_path: Path) -> None:
    other = tiny_llama.write_folder(tmp_path / "other", tiny_llama.tensors())
    document = json.loads((other / "tokenizer.json").read_text())
    vocab = document["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (other / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(LoadFault, match="the draft model has another tokenizer"):
        load_engine(settings(folder, f"draft:{other}"))
