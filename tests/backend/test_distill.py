"""From prompts to a head: samples, training, and how far guesses get."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from backend.distill.acceptance import (
    DEPTH,
    acceptance_length,
    head_guesses,
    ngram_guesses,
    no_guesses,
)
from backend.distill.prompts import PromptFileError, read_prompts
from backend.distill.samples import Sample, hidden_states
from backend.distill.training import Training, TrainingPlan, output_rows, rate_at
from backend.distill.windows import commonest_tokens, windows_of
from tests.backend.toy_head import new_toy_head, toy_head, toy_samples
from tests.backend.toy_model import ToyModel

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> list[Sample]:
    return toy_samples(tmp_path_factory.mktemp("samples"), count=8, max_tokens=20)


# Prompts


def test_a_text_file_holds_a_prompt_in_each_line(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_text("one\n\n  two  \n")
    assert [m[0]["content"] for m in read_prompts(path)] == ["one", "two"]


def test_json_lines_come_in_many_forms(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(
        '{"prompt": "a"}\n{"turns": ["b", "later"]}\n{"question": "c", "answer": "x"}\n'
        '{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "d"}]}\n'
    )
    read = read_prompts(path)
    assert [messages[-1]["content"] for messages in read] == ["a", "b", "c", "d"]
    assert len(read[3]) == 2


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('{"prompt": "a"}\n{', "line 2 is not JSON"),
        ('{"answer": "a"}', "line 1 holds no prompt"),
        ('{"messages": []}', "line 1 holds no prompt"),
        ('{"messages": [{"role": "user"}]}', "line 1 holds no prompt"),
        ("7", "line 1 holds no prompt"),
    ],
)
def test_a_line_without_a_prompt_is_named(tmp_path: Path, text: str, fault: str) -> None:
    (tmp_path / "p.jsonl").write_text(text)
    with pytest.raises(PromptFileError, match=fault):
        read_prompts(tmp_path / "p.jsonl")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(PromptFileError, match=r"none\.txt: cannot be read"):
        read_prompts(tmp_path / "none.txt")


# Samples


def test_the_hidden_states_are_what_the_answer_was_drawn_from(samples: list[Sample]) -> None:
    model, (greedy, *_) = ToyModel(), samples
    hidden = hidden_states(model, greedy.prompt_ids, greedy.output_ids.tolist())
    assert model.logits(hidden).argmax(-1).tolist() == greedy.output_ids.tolist()
    torch.testing.assert_close(greedy.hidden, hidden.half())


def test_a_shard_that_is_there_is_not_made_again(tmp_path: Path) -> None:
    made = toy_samples(tmp_path, count=2, max_tokens=5)
    again = toy_samples(tmp_path, count=2, max_tokens=9)
    assert [s.output_ids.tolist() for s in again] == [s.output_ids.tolist() for s in made]


def test_a_shard_of_a_run_that_asked_for_less_is_made_anew(tmp_path: Path) -> None:
    toy_samples(tmp_path, count=2, max_tokens=5)
    assert len(toy_samples(tmp_path, count=3, max_tokens=5)) == 3
    assert len(toy_samples(tmp_path, count=1, max_tokens=5)) == 1


# Training


def test_windows_never_cross_from_one_answer_into_the_next(samples: list[Sample]) -> None:
    windows = windows_of(samples)
    places, exists = windows.batch(seed=1, size=200, depth=4)
    ends = torch.tensor([len(s.output_ids) for s in samples]).cumsum(0)
    answer_of = torch.bucketize(places, ends, right=True)
    same_answer = answer_of[:, 1:] == answer_of[:, :1]
    assert torch.equal(exists, same_answer & (places[:, 1:] > places[:, :-1]))
    assert exists[:, 0].all()


def test_answers_of_one_token_teach_nothing() -> None:
    with pytest.raises(ValueError, match="shorter than two tokens"):
        windows_of([Sample([1], torch.tensor([2]), torch.zeros(1, 16).half())])


def test_the_commonest_tokens_come_first_then_the_lowest() -> None:
    ids = commonest_tokens(torch.tensor([5, 9, 9, 5, 9, 3]), vocab_size=12, count=5)
    assert ids.tolist() == [9, 5, 3, 0, 1]


def test_the_rows_of_the_output_head_are_read_from_its_logits() -> None:
    model, hidden = ToyModel(), torch.randn(3, 16, generator=torch.Generator().manual_seed(0))
    rows = output_rows(model, torch.tensor([4, 60]))
    torch.testing.assert_close(hidden @ rows.T, model.logits(hidden)[:, [4, 60]])


def train(samples: list[Sample], folder: Path, steps: int) -> Training:
    plan = TrainingPlan(steps=steps, batch_size=16, checkpoint_steps=3)
    return Training(new_toy_head(), windows_of(samples), plan, folder, "cpu")


def test_training_that_was_stopped_goes_on_where_it_was(
    samples: list[Sample], tmp_path: Path
) -> None:
    (tmp_path / "whole").mkdir()
    whole = list(train(samples, tmp_path / "whole", 8).run())
    stopped = train(samples, tmp_path, 8).run()
    losses = [next(stopped) for _ in range(5)]
    stopped.close()
    again = train(samples, tmp_path, 8)
    assert again.step == 5
    assert losses + list(again.run()) == pytest.approx(whole, rel=1e-4)


def test_a_checkpoint_of_another_shape_is_refused(samples: list[Sample], tmp_path: Path) -> None:
    list(train(samples, tmp_path, 1).run())
    head = new_toy_head()
    head.down.data = head.down.data[:, :8]
    with pytest.raises(ValueError, match="of a head of another shape"):
        Training(head, windows_of(samples), TrainingPlan(1), tmp_path, "cpu")


def test_a_damaged_checkpoint_is_refused(samples: list[Sample], tmp_path: Path) -> None:
    (tmp_path / "checkpoint.pt").write_bytes(b"PK\x03\x04 half a file")
    with pytest.raises(ValueError, match="is damaged"):
        train(samples, tmp_path, 1)


def test_the_learning_rate_goes_up_and_then_down() -> None:
    rates = [rate_at(step, 500) for step in (0, 25, 50, 275, 499)]
    assert rates == pytest.approx([0.02, 0.52, 1.0, 0.525, 0.05], abs=0.01)


# Acceptance


def test_without_guesses_a_step_brings_one_token(samples: list[Sample]) -> None:
    assert acceptance_length(samples, no_guesses) == 1.0


def test_an_oracle_brings_all_its_guesses_and_one_more() -> None:
    sample = Sample([1], torch.arange(41), torch.zeros(41, 16).half())
    length = acceptance_length([sample], lambda s: lambda place: list(range(place + 1, place + 5)))
    assert length == 1 + DEPTH


def test_ngrams_get_far_where_the_text_repeats() -> None:
    sample = Sample([1, 2, 3, 4, 5], torch.tensor([1, 2, 3, 4, 5] * 8), torch.zeros(40, 16).half())
    assert acceptance_length([sample], ngram_guesses) > 4


def test_training_makes_guesses_get_further(samples: list[Sample]) -> None:
    before = acceptance_length(samples, head_guesses(new_toy_head()))
    assert acceptance_length(samples, head_guesses(toy_head())) > before + 0.1
