"""The data directory, locked for one supervisor, and the run directory for its sockets."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import stat
import tempfile
from pathlib import Path

# What a socket's name may take of the ~104 bytes that the system allows for its path.
MAX_SOCKET_PATH_BYTES = 100
SOCKET_NAME_BYTES = 40


class DirectoryFault(Exception):
    """Why a directory cannot be used, in one line."""


def lock_data_dir(data_dir: Path) -> int:
    """Make the directory and hold it; the lock goes with the descriptor, and so with the process, however it ends.

    Raises:
        DirectoryFault: it cannot be written, or another supervisor holds it.
    """
    try:
        data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock_fd = os.open(
            data_dir / "supervisor.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
        )
    except OSError as exc:
        raise DirectoryFault(f'store.data_dir: cannot write "{data_dir}": {exc.strerror}') from exc
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(lock_fd, 0)
        os.pwrite(lock_fd, f"{os.getpid()}\n".encode(), 0)
    except BlockingIOError as exc:
        holder = os.pread(lock_fd, 20, 0).decode("ascii", "replace").strip() or "unknown"
        os.close(lock_fd)
        message = f'store.data_dir: "{data_dir}" is in use by another tidegate (process {holder})'
        raise DirectoryFault(f"{message}; stop it or choose another data_dir") from exc
    except OSError as exc:
        os.close(lock_fd)
        raise DirectoryFault(f'store.data_dir: cannot write "{data_dir}": {exc.strerror}') from exc
    return lock_fd


def make_run_dir(data_dir: Path) -> Path:
    """A folder of mode 0700 that belongs to us: `data_dir`/run, or a short one where that is too long for sockets.

    Raises:
        DirectoryFault: it cannot be made, or somebody else made it.
    """
    run_dir = _run_dir(data_dir)
    try:
        run_dir.mkdir(mode=0o700, exist_ok=True)
        status = run_dir.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            raise DirectoryFault(f'run directory "{run_dir}" belongs to somebody else')
        run_dir.chmod(0o700)
    except OSError as exc:
        message = f'run directory "{run_dir}" cannot be made: {exc.strerror}'
        raise DirectoryFault(message) from exc
    return run_dir


def _run_dir(data_dir: Path) -> Path:
    run_dir = data_dir / "run"
    if len(os.fsencode(run_dir)) + 1 + SOCKET_NAME_BYTES <= MAX_SOCKET_PATH_BYTES:
        return run_dir
    digest = hashlib.sha256(os.fsencode(data_dir)).hexdigest()[:12]
    return Path(tempfile.gettempdir()) / f"tidegate-{os.getuid()}-{digest}"


def leave_run_dir(data_dir: Path) -> None:
    """Take away a run directory that stands outside of `data_dir`. Only while the data directory is locked."""
    run_dir = _run_dir(data_dir)
    if run_dir.parent != data_dir:
        shutil.rmtree(run_dir, ignore_errors=True)
