from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from gateway.directories import DirectoryFault, leave_run_dir, lock_data_dir, make_run_dir


def test_a_second_supervisor_on_the_same_data_is_refused_with_the_first_ones_process(
    tmp_path: Path,
) -> None:
    lock_fd = lock_data_dir(tmp_path / "data")
    with pytest.raises(
        DirectoryFault, match=rf"in use by another tidegate \(process {os.getpid()}\)"
    ):
        lock_data_dir(tmp_path / "data")
    os.close(lock_fd)


def test_the_lock_is_free_when_its_holder_is_gone(tmp_path: Path) -> None:
    os.close(lock_data_dir(tmp_path))
    os.close(lock_data_dir(tmp_path))


def test_a_data_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DirectoryFault, match=r'store.data_dir: cannot write ".*file/data"'):
        lock_data_dir(tmp_path / "file" / "data")


def test_the_run_directory_is_made_private_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    make_run_dir(tmp_path).chmod(0o777)
    assert stat.S_IMODE(make_run_dir(tmp_path).stat().st_mode) == 0o700


def test_a_short_data_directory_holds_its_run_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []
    monkeypatch.setattr(Path, "mkdir", lambda self, **_: made.append(self))
    with pytest.raises(DirectoryFault):  # nothing was really made
        make_run_dir(Path("/d"))
    assert made == [Path("/d/run")]


def test_a_long_data_directory_gets_a_short_run_directory_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    one, two = (make_run_dir(tmp_path / f"{name}{'x' * 100}") for name in "ab")
    assert one != two
    assert one.parent == two.parent == tmp_path
    assert one == make_run_dir(tmp_path / f"a{'x' * 100}")


def test_a_run_directory_that_somebody_laid_out_for_us_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    data_dir = tmp_path / ("x" * 100)
    run_dir = make_run_dir(data_dir)
    run_dir.rmdir()
    run_dir.symlink_to(tmp_path)
    with pytest.raises(DirectoryFault, match="belongs to somebody else"):
        make_run_dir(data_dir)


def test_a_run_directory_outside_of_the_data_goes_with_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    data_dir = tmp_path / ("x" * 100)
    run_dir = make_run_dir(data_dir)
    (run_dir / "left.sock").touch()
    leave_run_dir(data_dir)
    assert not run_dir.exists()
