"""The native tier's library: built on first use with the system's compiler, kept in the user's cache, never required.

`native_available()` says why not, when not. The file name in the cache is a hash of the source, the compiler, its
flags and the CPU's features, so a changed machine or version builds anew and never loads what it cannot run.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from backend.cpu.native_abi import Config, DrawRule, Matrix, Step

BUILD_TIMEOUT_S = 180
_SOURCE = Path(__file__).with_name("native.cpp")
_FLAGS = ["-std=c++17", "-O3", "-ffp-contract=off", "-fPIC", "-shared", "-pthread", "-Wno-psabi"]
_TARGETS = (["-march=native"], ["-mcpu=native"], [])  # x86, Arm, and a compiler that knows neither


class NativeUnavailableError(Exception):
    """Why this machine has no native tier, in one line."""


def native_available() -> str | None:
    """None when the native tier can run here; else the reason. The first call may compile for some seconds."""
    try:
        native_library()
    except NativeUnavailableError as exc:
        return str(exc)
    return None


def default_threads() -> int:
    """What the machine can spare: all of two cores, else all but one, which the gateway keeps."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    return cores if cores <= 2 else cores - 1


@cache
def _loaded() -> ctypes.CDLL | str:
    try:
        return _declared(ctypes.CDLL(str(build_library(cache_dir()))))
    except (NativeUnavailableError, OSError) as exc:
        return str(exc)


def native_library() -> ctypes.CDLL:
    """Raises NativeUnavailableError; a failure is remembered, so the compiler is tried once a process."""
    library = _loaded()
    if isinstance(library, str):
        raise NativeUnavailableError(library)
    return library


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    c_int, c_ptr = ctypes.c_int, ctypes.c_void_p
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "tidegate_lanes": (c_int, []),
        "tidegate_use_huge_pages": (None, [c_ptr, ctypes.c_int64]),
        "tidegate_packed_bytes": (ctypes.c_int64, [c_int, c_int, c_int]),
        "tidegate_pack": (None, [c_int, c_ptr, ctypes.c_int64, c_ptr, c_int, c_int, c_ptr]),
        "tidegate_linear": (
            ctypes.c_char_p,
            [ctypes.POINTER(Matrix), c_ptr, c_int, c_ptr, c_int, c_int],
        ),
        "tidegate_draw": (c_int, [c_ptr, c_int, ctypes.POINTER(DrawRule)]),
        "tidegate_weight": (ctypes.c_double, [c_ptr, c_int, ctypes.c_float]),
        "tidegate_likeliest": (ctypes.c_bool, [c_ptr, c_int, ctypes.c_float, c_int, c_ptr]),
        "tidegate_model_new": (c_ptr, [ctypes.POINTER(Config)]),
        "tidegate_model_free": (None, [c_ptr]),
        "tidegate_forward": (ctypes.c_char_p, [c_ptr, ctypes.POINTER(Step)]),
        "tidegate_logits": (ctypes.c_char_p, [c_ptr, c_ptr, c_int, c_ptr]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def cache_dir() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "tidegate"


def build_library(folder: Path, extra_flags: Sequence[str] = ()) -> Path:
    """The library's path, compiled now if it is not there yet. Processes that start together build it once."""
    compiler = _compiler()
    version = _run([compiler, "--version"], timeout_s=20)
    key = hashlib.sha256(_SOURCE.read_bytes())
    for part in (version, *_FLAGS, *extra_flags, _cpu_features()):
        key.update(part.encode() + b"\0")
    try:
        _make_private(folder)
        target = folder / f"native-{key.hexdigest()[:20]}.so"
        with _locked(folder / "native.lock"):
            if not target.exists():
                _compile(compiler, extra_flags, target)
    except OSError as exc:
        raise NativeUnavailableError(f"cannot keep the native library in {folder}: {exc}") from exc
    return target


def _compiler() -> str:
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    for name in names:
        if path := shutil.which(name):
            return path
    raise NativeUnavailableError(f"no C++ compiler found (looked for {', '.join(names)})")


def _compile(compiler: str, extra_flags: Sequence[str], target: Path) -> None:
    """To a temporary name, then renamed: a reader sees the whole library or none."""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as scratch:
        built = Path(scratch) / target.name
        fault = NativeUnavailableError("nothing was tried")
        for machine in _TARGETS:
            try:
                _run([compiler, *_FLAGS, *machine, *extra_flags, str(_SOURCE), "-o", str(built)])
            except NativeUnavailableError as exc:
                fault = exc
                continue
            built.replace(target)
            return
        raise fault


def _run(command: Sequence[str], timeout_s: float = BUILD_TIMEOUT_S) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        raise NativeUnavailableError(f"{command[0]} took longer than {timeout_s:.0f} s") from None
    except OSError as exc:
        raise NativeUnavailableError(f"{command[0]} cannot be run: {exc}") from exc
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        error = next((line for line in lines if "error" in line), lines[-1])
        raise NativeUnavailableError(f"{command[0]} failed: {error[:200]}")
    return done.stdout


def _cpu_features() -> str:
    """Distinguishes machines that `-march=native` would build for differently."""
    try:
        for line in (
            Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        ):
            if line.startswith(("flags", "Features")):
                return platform.machine() + line
    except OSError:
        pass
    return f"{platform.machine()} {platform.processor()} {platform.platform()}"


def _make_private(folder: Path) -> None:
    """Code is loaded from here, so nobody else may be able to write here."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise NativeUnavailableError(f"{folder} can be written by others; `chmod go-w` it")


@contextmanager
def _locked(path: Path):  # -> Iterator[None]
    try:
        import fcntl
    except ImportError:
        raise NativeUnavailableError("the native tier needs Linux or macOS") from None
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
