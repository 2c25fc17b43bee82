from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from backend.models.errors import ModelLoadError
from backend.models.hub import fetch_hub_model


@pytest.mark.parametrize(
    "name", ["hub:", "hub:owner", "hub:a/b/c", "hub:../x", "hub:a/", "hub:a b/c"]
)
def test_a_malformed_name_is_refused_before_any_request(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda *a, **k: pytest.fail("asked the hub")
    )
    with pytest.raises(ModelLoadError, match="is written hub:owner/name"):
        fetch_hub_model(name)


def test_no_network_and_no_copy_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*args: Any, **options: Any) -> str:
        raise LocalEntryNotFoundError("a long story\nin two lines")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(ModelLoadError) as caught:
        fetch_hub_model("hub:owner/name")
    assert str(caught.value) == (
        "hub:owner/name: the hub cannot be reached and there is no copy in its cache; give a path instead"
    )


def patterns_asked(monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[list[str]]:
    asked: list[list[str]] = []

    def snapshot(repo: str, *, allow_patterns: list[str]) -> str:
        assert repo == "owner/name"
        asked.append(allow_patterns)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    return asked


def test_safetensors_come_with_their_settings_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.safetensors").touch()
    asked = patterns_asked(monkeypatch, tmp_path)
    assert fetch_hub_model("hub:owner/name") == tmp_path
    assert len(asked) == 1
    assert {"*.safetensors", "*.json"} <= set(asked[0])


def test_a_repository_without_safetensors_is_asked_for_its_gguf(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = patterns_asked(monkeypatch, tmp_path)
    fetch_hub_model("hub:owner/name")
    assert asked[1] == ["*.gguf"]
