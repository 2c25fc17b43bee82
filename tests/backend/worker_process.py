"""Worker processes for tests: started as the supervisor starts them, killed at the end."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from backend.options import WorkerSettings
from backend.protocol import encode_frame

ROOT = Path(__file__).resolve().parents[2]
TOY = (sys.executable, str(Path(__file__).with_name("toy_worker.py")))
DEADLINE_S = 60.0


class WorkerProcess:
    def __init__(
        self,
        run_dir: Path,
        *,
        argv: Sequence[str] = TOY,
        model_path: str = "toy",
        stdin: bytes | None = None,
        socket_path: Path | None = None,
    ) -> None:
        self.socket_path = socket_path or run_dir / "engine-local-0.sock"
        settings = WorkerSettings("local/0", str(self.socket_path), model_path, str(run_dir))
        self.process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert self.process.stdin is not None
        self.process.stdin.write(stdin or bytes(encode_frame(settings)))
        self.process.stdin.flush()

    def wait_ready(self) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while not self._answers():
            assert self.process.poll() is None, self.stderr()
            assert time.monotonic() < deadline_s
            time.sleep(0.01)

    def _answers(self) -> bool:
        """A file alone says nothing: a dead worker may have left it."""
        with socket.socket(socket.AF_UNIX) as probe:
            return probe.connect_ex(str(self.socket_path)) == 0

    def end_stdin(self) -> int:
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(DEADLINE_S)

    def stderr(self) -> str:
        """All of it, once the process has ended."""
        assert self.process.stderr is not None
        return self.process.stderr.read().decode()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stderr):
            if stream is not None:
                stream.close()
