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
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from backend.cpu.packed import PackedWeight

KINDS = (
    "F32",
    "F16",
    "BF16",
    "Q8_0",
    "Q4_0",
    "Q4_1",
)  # in the order of `enum Kind`; others become F32
PANEL_ROWS = 16
BUILD_TIMEOUT_S = 180
_SOURCE = Path(__file__).with_name("native.cpp")
_FLAGS = ["-std=c++17", "-O3", "-ffp-contract=off", "-fPIC", "-shared", "-pthread", "-Wno-psabi"]
_TARGETS = (["-march=native"], ["-mcpu=native"], [])  # x86, Arm, and a compiler that knows neither


class NativeUnavailableError(Exception):
    """Why this machine has no native tier, in one line."""


class Matrix(ctypes.Structure):
    _fields_ = [
        ("kind", ctypes.c_int32),
        ("rows", ctypes.c_int32),
        ("cols", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("data", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
    ]


class Layer(ctypes.Structure):
    _fields_ = [
        ("attn_norm", ctypes.c_void_p),
        ("mlp_norm", ctypes.c_void_p),
        ("qkv", Matrix),
        ("attn_out", Matrix),
        ("gate_up", Matrix),
        ("down", Matrix),
    ]


def _fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class Config(ctypes.Structure):
    _fields_ = [
        *_fields(ctypes.c_int32, "num_layers hidden ffn heads kv_heads head_dim vocab threads"),
        *_fields(ctypes.c_float, "eps score_scale"),
        *_fields(ctypes.c_void_p, "inv_freq norm"),
        ("embed", Matrix),
        ("lm_head", Matrix),
        ("layers", ctypes.POINTER(Layer)),
    ]


class Step(ctypes.Structure):
    _fields_ = [
        *_fields(ctypes.c_int32, "num_tokens num_seqs num_logits block_size max_blocks num_blocks"),
        *_fields(
            ctypes.c_void_p, "token_ids positions slots query_start context_lens block_tables"
        ),
        *_fields(ctypes.c_void_p, "logits_rows keys values logits"),
    ]


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
        "tidegate_packed_bytes": (ctypes.c_int64, [c_int, c_int, c_int]),
        "tidegate_pack": (None, [c_int, c_ptr, ctypes.c_int64, c_ptr, c_int, c_int, c_ptr]),
        "tidegate_linear": (ctypes.c_char_p, [ctypes.POINTER(Matrix), c_ptr, c_int, c_ptr, c_int]),
        "tidegate_model_new": (c_ptr, [ctypes.POINTER(Config)]),
        "tidegate_model_free": (None, [c_ptr]),
        "tidegate_forward": (ctypes.c_char_p, [c_ptr, ctypes.POINTER(Step)]),
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


@dataclass(frozen=True, slots=True, eq=False)
class NativeMatrix:
    """One packed matrix `[rows, cols]`; `struct` points into `data`, so keep the object while it is in use."""

    struct: Matrix
    data: Tensor

    @property
    def num_bytes(self) -> int:
        return self.data.numel()


def pack_matrix(weights: Sequence[PackedWeight], order: np.ndarray | None = None) -> NativeMatrix:
    """Stack matrices of equal width and bring them into panels; row i is row `order[i]` of the stack.

    A kind without a kernel, or a stack of mixed kinds, is kept as float32.
    """
    kinds = {w.kind for w in weights}
    kind = kinds.pop() if len(kinds) == 1 else "F32"
    rows, cols = sum(w.shape[0] for w in weights), weights[0].shape[1]
    if any(w.shape[1] != cols for w in weights):
        raise ValueError(
            f"matrices of different widths cannot be stacked: {[w.shape for w in weights]}"
        )
    if kind not in KINDS:
        kind = "F32"
    raw = np.concatenate([w.raw if w.kind == kind else _as_f32(w) for w in weights])
    order = np.arange(rows) if order is None else order
    if sorted(order.tolist()) != list(range(rows)):
        raise ValueError(f"order is no permutation of {rows} rows")
    return _packed(KINDS.index(kind), np.ascontiguousarray(raw), order.astype(np.int64), cols)


def _as_f32(weight: PackedWeight) -> np.ndarray:
    return weight.dequantize().numpy().view(np.uint8)


def _packed(kind: int, raw: np.ndarray, order: np.ndarray, cols: int) -> NativeMatrix:
    library, rows = native_library(), len(order)
    num_bytes = library.tidegate_packed_bytes(kind, rows, cols)
    if num_bytes < 0:
        raise ValueError(f"a {KINDS[kind]} matrix of {rows} x {cols} cannot be packed")
    data = torch.empty(num_bytes, dtype=torch.uint8)
    library.tidegate_pack(
        kind, raw.ctypes.data, raw.shape[1], order.ctypes.data, rows, cols, data.data_ptr()
    )
    return NativeMatrix(Matrix(kind, rows, cols, 0, data.data_ptr(), None), data)


def native_linear(x: Tensor, weight: NativeMatrix, threads: int = 1) -> Tensor:
    """float32 x [T, cols] -> x @ weight.T [T, rows]. Starts threads of its own: for tests and measurements."""
    if x.dtype != torch.float32 or x.dim() != 2 or x.shape[1] != weight.struct.cols:
        raise ValueError(
            f"x must be float32 [T, {weight.struct.cols}], got {x.dtype} {list(x.shape)}"
        )
    x, y = x.contiguous(), torch.empty(x.shape[0], weight.struct.rows)
    if x.shape[0]:
        fault = native_library().tidegate_linear(
            ctypes.byref(weight.struct), x.data_ptr(), x.shape[0], y.data_ptr(), threads
        )
        if fault:
            raise MemoryError(fault.decode())
    return y
