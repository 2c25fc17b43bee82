"""Start one server for a measurement, wait until it is ready, stop it with all its children."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from process_meter import process_tree

ROOT = Path(__file__).resolve().parent.parent
STOP_GRACE_S = 20.0


@dataclass
class Server:
    """`command` is run in `checkout`; `core`: the one processor that it may use."""

    name: str
    command: list[str]
    port: int
    log: Path
    ready_path: str
    env: Mapping[str, str] = field(default_factory=dict)
    headers: tuple[str, ...] = ()
    model: str = ""
    data_dir: Path | None = None
    core: int | None = None
    checkout: Path = ROOT
    start_timeout_s: float = 180.0
    start_s: float = 0.0
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> Server:
        """Raises RuntimeError with the end of its log when it does not become ready."""
        pin = [] if self.core is None else ["taskset", "-c", str(self.core)]
        begun = time.monotonic()
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*pin, *self.command],
                cwd=self.checkout,
                env={**os.environ, "NO_PROXY": "*", "no_proxy": "*", **self.env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        prefer(self.process.pid)
        while not self._is_ready():
            if self.process.poll() is not None or time.monotonic() - begun > self.start_timeout_s:
                self.stop()
                tail = self.log.read_text(errors="replace")[-800:]
                raise RuntimeError(f"{self.name} did not start:\n{tail}")
            time.sleep(0.02)
        self.start_s = time.monotonic() - begun
        return self

    @property
    def pids(self) -> list[int]:
        return process_tree(self.process.pid) if self.process else []

    def pause(self) -> None:
        """For peers without a supervisor that would notice: idle polling stays out of the others' samples."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def stop(self) -> None:
        if self.process is None:
            return
        self.resume()
        pids = self.pids
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_GRACE_S)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self.process = None

    def _signal(self, number: int) -> None:
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _is_ready(self) -> bool:
        url = f"http://127.0.0.1:{self.port}{self.ready_path}"
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(url, timeout=2) as answer:
                return answer.status == 200
        except (urllib.error.URLError, OSError):
            return False


def prefer(pid: int | str, nice: int = -20) -> None:
    """With BENCH_PREFER=1, let the session of this process (its `autogroup`) run before others on a shared machine.

    Needs root. What stays is the others' share of the caches, of memory bandwidth and of a core's second thread.
    """
    if os.environ.get("BENCH_PREFER") == "1":
        Path(f"/proc/{pid}/autogroup").write_text(str(nice))


def stop_cleanly_on_signals() -> None:
    """Else the servers that a stopped benchmark has started would live on."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: sys.exit(128 + number))


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def tidegate_server(scratch: Path, config: str, core: int | None = None) -> Server:
    """`tidegate serve` of this checkout. `config` is the TOML text after [server], [auth] and [store]."""
    port, key = free_port(), "sk-bench-0123456789abcdef0123456789abcdef"
    head = (
        f'[server]\nport = {port}\n[auth]\nmode = "keys"\n[[auth.keys]]\nname = "bench"\nkey = "{key}"\n'
        f'[store]\ndata_dir = "data"\n[telemetry]\nlog_level = "warning"\n'
    )
    path = scratch / "tidegate.toml"
    path.write_text(head + config, encoding="utf-8")
    return Server(
        name="tidegate",
        command=[sys.executable, "-m", "gateway.cli", "serve", "--config", str(path)],
        port=port,
        log=scratch / "tidegate.log",
        ready_path="/readyz",
        headers=(f"authorization: Bearer {key}",),
        data_dir=scratch / "data",
        core=core,
    )
