"""What `type = "engine"` needs before a gateway runs: checks of its table, model files, and a process a replica."""

from __future__ import annotations

import hashlib
import os
import re
import sys
from pathlib import Path

from backend.extra import missing_extra
from backend.models.demo import fetch_demo_model
from backend.models.errors import ModelLoadError
from backend.models.hub import fetch_hub_model
from backend.options import WorkerSettings, option_faults, parse_options
from backend.progress_bar import download_bar
from backend.protocol import encode_frame
from plugins.errors import GatewayError
from plugins.interfaces import ProcessSpec, ProviderSettings, Runtime

DEMO, HUB = "demo", "hub:"


def setting_faults(settings: ProviderSettings) -> list[str]:
    """What refuses the start, each as "key: what is wrong"."""
    if fault := missing_extra():
        return [f'type: "engine" {fault}']
    faults = _path_faults(settings.path) + option_faults(settings.engine)
    if not faults:
        options = parse_options(settings.engine)
        faults = _draft_faults(options.draft_path) + _head_faults(options.head_path)
    if settings.template and not Path(settings.template).is_file():
        faults.append(f"template: {settings.template}: no such file")
    unused = {
        "base_url": settings.base_url,
        "api_key": settings.api_key,
        "headers": settings.headers,
        "options": settings.options,
    }
    return faults + [f"{key}: not used by type engine" for key, value in unused.items() if value]


def fetch_model(settings: ProviderSettings, runtime: Runtime) -> None:
    """Bring a model that is not a local path onto this machine, with a progress bar on standard error.

    Raises:
        GatewayError: it cannot be had; the message says what to do.
    """
    try:
        if settings.path == DEMO:
            with download_bar("fetching the demo model") as report:
                fetch_demo_model(runtime.data_dir, report)
        elif settings.path.startswith(HUB):
            fetch_hub_model(settings.path)  # shows its own progress
    except ModelLoadError as exc:
        raise GatewayError(f"providers.{settings.name}: {exc}") from exc


def worker_processes(settings: ProviderSettings, runtime: Runtime) -> list[ProcessSpec]:
    """One worker a replica; the CPUs are shared out evenly unless `threads` says otherwise."""
    options = parse_options(settings.engine)
    threads = options.threads or max(1, _num_cpus() // options.replicas)
    return [
        ProcessSpec(
            name=f"engine {settings.name}/{i}",
            argv=(sys.executable, "-m", "backend.worker"),
            env={"OMP_NUM_THREADS": str(threads)},
            stdin=bytes(encode_frame(_worker_settings(settings, runtime, i, threads))),
        )
        for i in range(options.replicas)
    ]


def socket_path(name: str, runtime: Runtime, replica: int) -> Path:
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,24}", name):  # a socket's path has 100 bytes at most
        name = hashlib.sha256(name.encode()).hexdigest()[:16]
    return runtime.run_dir / f"engine-{name}-{replica}.sock"


def _worker_settings(
    settings: ProviderSettings, runtime: Runtime, replica: int, threads: int
) -> WorkerSettings:
    return WorkerSettings(
        name=f"{settings.name}/{replica}",
        socket_path=str(socket_path(settings.name, runtime, replica)),
        model_path=settings.path,
        data_dir=str(runtime.data_dir),
        template=settings.template,
        threads=threads,
        options=parse_options(settings.engine),
    )


def _draft_faults(path: str) -> list[str]:
    if not path:
        return []
    if path == DEMO or path.startswith(HUB):
        return [f"engine.speculative: {path}: a draft model is a folder or a .gguf file"]
    return [f"engine.speculative: {fault.removeprefix('path: ')}" for fault in _path_faults(path)]


def _head_faults(path: str) -> list[str]:
    if not path or Path(path).exists():
        return []
    return [f"engine.speculative: {path}: no such file or folder"]


def _path_faults(path: str) -> list[str]:
    """Only what is quick to see; a damaged file is the worker's to find, before it serves."""
    if not path:
        return ['path: required: a folder, a .gguf file, "hub:owner/name", or "demo"']
    if path == DEMO:
        return []
    if path.startswith(HUB):
        if re.fullmatch(r"[\w.-]+/[\w.-]+", path.removeprefix(HUB)):
            return []
        return [f'path: {path}: expected "hub:owner/name"']
    file = Path(path)
    if not file.exists():
        return [f"path: {path}: no such file or folder"]
    if file.is_dir():
        known = (file / "config.json").is_file() or any(file.glob("*.gguf"))
        return [] if known else [f"path: {path}: neither a config.json nor a .gguf file in it"]
    try:
        with file.open("rb") as opened:
            return [] if opened.read(4) == b"GGUF" else [f"path: {path}: not a GGUF file"]
    except OSError as exc:
        return [f"path: {path}: cannot be read ({exc.strerror})"]


def _num_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
