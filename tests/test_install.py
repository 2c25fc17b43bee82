"""`pip install .` without extras: a gateway that serves remote providers, with no torch on the machine."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import serving

ROOT = Path(__file__).resolve().parent.parent
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
CONFIG = """
[auth]
mode = "open"
[[providers]]
name = "up"
type = "openai_compatible"
base_url = "{url}"
[[models]]
name = "remote"
targets = ["up/up-model"]
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("plain")
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    python = str(folder / "venv/bin/python")
    subprocess.run([python, "-m", "pip", "install", "-qq", str(ROOT)], check=True, cwd=folder)
    yield python


def test_nothing_of_the_engine_is_installed(python: str) -> None:
    probe = "import importlib.util as u; print([n for n in ('torch', 'numpy') if u.find_spec(n)])"
    done = subprocess.run([python, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_remote_providers_are_served(
    python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "PYTHON", python)
    with (
        serving.upstream() as peer,
        serving.serving(tmp_path, CONFIG.format(url=peer.url)) as server,
    ):
        body = {"model": "remote", "messages": [{"role": "user", "content": "hi"}]}
        status, answer = server.post("/v1/chat/completions", body)
    assert (status, answer["choices"][0]["message"]["content"]) == (200, "from upstream")


def test_asking_for_the_engine_says_what_to_install(python: str, tmp_path: Path) -> None:
    command = [python, "-m", "gateway.cli", "serve", "--model", "demo"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "pip install 'tidegate[backend]'" in done.stderr
    assert "Traceback" not in done.stderr
