"""What an embedding model's files say about pooling is what the engine does, unless it is told otherwise."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from backend.models.errors import ModelLoadError
from backend.models.pooling import stated_pooling
from backend.options import EngineOptions
from backend.worker import _engine_config
from tests.backend import tiny_llama

MEAN, LAST, CLS = (f"pooling_mode_{name}" for name in ("mean_tokens", "lasttoken", "cls_token"))


def folder(path: Path, **config: Any) -> Path:
    (path / "1_Pooling").mkdir()
    (path / "config.json").write_text("{}")
    (path / "1_Pooling" / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"word_embedding_dimension": 8, MEAN: True, LAST: False}, "mean"),
        ({MEAN: False, LAST: True, CLS: False}, "last"),
        ({}, None),
    ],
)
def test_a_sentence_transformers_folder_says_it(
    tmp_path: Path, config: dict[str, Any], expected: str | None
) -> None:
    assert stated_pooling(folder(tmp_path, **config)) == expected


@pytest.mark.parametrize("config", [{CLS: True}, {MEAN: True, CLS: True}])
def test_pooling_that_is_not_there_is_told_in_the_log(
    tmp_path: Path, config: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert stated_pooling(folder(tmp_path, **config)) is None
    assert CLS in caplog.text


def test_a_folder_of_a_chat_model_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert stated_pooling(tmp_path) is None


def test_a_damaged_pooling_file_is_named(tmp_path: Path) -> None:
    path = folder(tmp_path)
    (path / "1_Pooling" / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"1_Pooling/config\.json"):
        stated_pooling(path)


@pytest.mark.parametrize(("kind", "expected"), [(None, None), (0, None), (1, "mean"), (3, "last")])
def test_a_gguf_file_says_it_alone_or_in_a_folder(
    tmp_path: Path, kind: int | None, expected: str | None
) -> None:
    path = tiny_llama.write_gguf(
        tmp_path / "m.gguf", tiny_llama.tensors(), llama__pooling_type=kind
    )
    assert stated_pooling(path) == stated_pooling(tmp_path) == expected


def test_a_gguf_files_pooling_that_is_not_there_is_told_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tiny_llama.write_gguf(tmp_path / "m.gguf", tiny_llama.tensors(), llama__pooling_type=2)
    with caplog.at_level(logging.WARNING):
        assert stated_pooling(path) is None
    assert "pooling cls" in caplog.text


@pytest.mark.parametrize(
    ("option", "expected"), [("auto", "last"), ("mean", "mean"), ("last", "last")]
)
def test_the_option_goes_before_what_the_model_says(
    tmp_path: Path, option: Any, expected: str
) -> None:
    path = folder(tmp_path, **{LAST: True})
    assert _engine_config(EngineOptions(pooling=option), path).pooling == expected


def test_means_are_the_rule_where_nothing_is_said(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert _engine_config(EngineOptions(), tmp_path).pooling == "mean"
