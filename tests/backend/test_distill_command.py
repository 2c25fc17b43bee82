"""`tidegate distill-draft` from prompts to a head that serves, on a tiny checkpoint."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from backend.distill.command import EXIT_FAULT, EXIT_INTERRUPTED, main
from backend.distill.training import Training
from backend.models.draft_head import load_draft_head
from tests.backend import tiny_llama

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def folder_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama.write_folder(tmp_path_factory.mktemp("m") / "tiny", tiny_llama.tensors())


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("hello\nhe\nll\nhell\n")
    return path


def distill(model: Path, data: Path, out: Path, *more: str) -> int:
    few = ["--steps", "3", "--answers", "4", "--max-tokens", "8", "--draft-vocab", "32"]
    fewer = ["--width", "8", "--batch-size", "8", "--threads", "1"]
    return main([str(model), "--data", str(data), "--out", str(out), *few, *fewer, *more])


def test_a_head_is_trained_and_its_reach_is_told(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert distill(model, data, tmp_path / "out") == 0
    told = capsys.readouterr().out
    assert re.search(r"none +1\.00\n +ngram +\d\.\d\d\n +head +\d\.\d\d\n", told)
    assert f'speculative = "head:{tmp_path / "out"}"' in told
    assert len(load_draft_head(tmp_path / "out").draft_ids) == 32
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["held_prompts"] == 1
    assert set(report["tokens_a_step"]) == {"none", "ngram", "head"}


def test_the_same_folder_goes_on_with_more_steps_and_answers(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    assert distill(model, data, out, "--answers", "32") == 0
    shard = (out / "samples" / "00000.safetensors").stat().st_mtime_ns
    began: list[int] = []
    run = Training.run

    def watched(training: Training) -> Any:
        began.append(training.step)
        return run(training)

    monkeypatch.setattr(Training, "run", watched)
    assert distill(model, data, out, "--steps", "5", "--answers", "40") == 0
    assert began == [3]
    assert (out / "samples" / "00000.safetensors").stat().st_mtime_ns == shard
    assert (out / "samples" / "00001.safetensors").exists()


def test_an_interrupt_keeps_what_was_trained(
    model: Path,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    take_step = Training._take_step

    def interrupted(training: Training) -> float:
        if training.step == 2:
            raise KeyboardInterrupt
        return take_step(training)

    monkeypatch.setattr(Training, "_take_step", interrupted)
    out = tmp_path / "out"
    assert distill(model, data, out) == EXIT_INTERRUPTED
    assert "the same command goes on from here" in capsys.readouterr().err
    assert torch.load(out / "checkpoint.pt", weights_only=True)["step"] == 2
    load_draft_head(out)


def test_a_folder_of_other_things_is_refused(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.txt").touch()
    assert distill(model, data, tmp_path) == EXIT_FAULT
    assert_one_line(capsys, "holds other files")


def test_a_folder_of_another_run_is_refused(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert distill(model, data, out) == 0
    capsys.readouterr()
    assert distill(model, data, out, "--max-tokens", "9") == EXIT_FAULT
    assert_one_line(capsys, "holds a run with another --max-tokens")
    assert distill(model, data, out, "--width", "16") == EXIT_FAULT
    assert_one_line(capsys, "of a head of another shape")


@pytest.mark.parametrize(
    ("more", "fault"),
    [
        (["--data", "single.txt"], "needs two prompts or more"),
        (["--max-tokens", "1000"], "the model was made for 128"),
        (["--device", "cuda"], "torch finds no GPU here"),
    ],
)
def test_what_cannot_work_is_refused_before_it_begins(
    model: Path, data: Path, more: list[str], fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("single.txt").write_text("one\n")
    assert distill(model, data, Path("out"), *more) == EXIT_FAULT
    assert_one_line(capsys, fault)
    assert not Path("out").exists()


def test_a_model_that_is_not_there_is_one_line(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert distill(Path("/no/such"), data, tmp_path / "out") == EXIT_FAULT
    assert_one_line(capsys, "/no/such: no such file or folder")


def assert_one_line(capsys: pytest.CaptureFixture[str], fault: str) -> None:
    (line,) = [part for part in capsys.readouterr().err.splitlines() if part.strip()]
    assert line.startswith("tidegate distill-draft: ")
    assert fault in line


def test_the_command_is_one_of_tidegate() -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "gateway.cli", "distill-draft", "/no/such", "--steps", "0"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == EXIT_FAULT
    assert "tidegate distill-draft: error: argument --steps: must be at least 1" in done.stderr
