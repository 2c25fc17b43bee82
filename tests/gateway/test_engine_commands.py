from __future__ import annotations

import importlib.util

import pytest

from gateway.cli import main


def test_a_command_of_the_engine_parses_its_own_arguments(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert main(["distill-draft", "demo"]) == 2
    assert "tidegate distill-draft: error: the following arguments are required: --data, --out" in (
        capfd.readouterr().err
    )


def test_without_the_engine_it_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["distill-draft", "demo"]) == 2
    assert capsys.readouterr().err == (
        "tidegate distill-draft: needs the engine: pip install 'tidegate[backend]'\n"
    )
