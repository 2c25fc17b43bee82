"""`tidegate serve` as its users start it: a config file, a process tree, a port."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import redis

ROOT = Path(__file__).resolve().parent.parent
PYTHON = sys.executable
"""Which installation is served: this checkout's, unless a test says another."""


def wait_until(condition: Callable[[], Any], timeout_s: float = 30.0, what: str = "it") -> Any:
    """Poll for something that another process will do."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, urllib.error.URLError, redis.RedisError):
            if value := condition():
                return value
        time.sleep(0.05)
    raise AssertionError(f"{what} did not happen within {timeout_s} s")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_tidegate(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """A command that ends by itself."""
    command = [sys.executable, "-m", "gateway.cli", *words]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, cwd=cwd, env=env, capture_output=True, text=True, timeout=60, check=False
    )


class Tidegate:
    """A running server. `kill` and `rows` look at it from outside, as an operator would."""

    def __init__(self, folder: Path, config: str) -> None:
        self.port = free_port()
        self.folder = folder
        self.url = f"http://127.0.0.1:{self.port}"
        (folder / "config.toml").write_text(
            f"[server]\nport = {self.port}\nshutdown_grace_s = 10\n\n{config}", encoding="utf-8"
        )
        self.log = folder / "log.txt"
        command = [PYTHON, "-m", "gateway.cli", "serve", "--config", "config.toml"]
        here = {"PYTHONPATH": str(ROOT)} if sys.executable == PYTHON else {}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, cwd=folder, env=os.environ | here, stdout=log, stderr=log
            )

    def ready(self) -> bool:
        if self.process.poll() is not None:
            raise RuntimeError(self.log.read_text())
        with urllib.request.urlopen(f"{self.url}/readyz", timeout=5) as answer:
            return answer.status == 200

    def post(self, path: str, body: Any, key: str = "sk-test") -> tuple[int, dict[str, Any]]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
        request = urllib.request.Request(f"{self.url}{path}", data, headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    @contextmanager
    def stream(self, path: str, body: dict[str, Any]) -> Iterator[Iterator[str]]:
        """The data of each event, as it comes; leaving the block drops the connection."""
        data = json.dumps(body | {"stream": True}).encode()
        with socket.create_connection(("127.0.0.1", self.port), timeout=60) as connection:
            head = (
                f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                f"authorization: Bearer sk-test\r\ncontent-length: {len(data)}\r\n"
                "connection: close\r\n\r\n"
            )
            connection.sendall(head.encode() + data)
            yield _event_data(connection)

    def metric(self, name: str, **labels: str) -> float:
        """Sum of the samples of `name` that carry these labels."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=5) as answer:
            text = answer.read().decode()
        wanted = {f'{key}="{value}"' for key, value in labels.items()}
        samples = re.findall(rf"^{name}(?:{{(.*)}})? (\S+)$", text, re.MULTILINE)
        return sum(float(value) for found, value in samples if wanted <= set(found.split(",")))

    def rows(self, **wanted: Any) -> list[dict[str, Any]]:
        """Usage rows with these values, read from the embedded store by a client of its own."""
        with redis.Redis(unix_socket_path=self._store_socket(), socket_timeout=5) as store:
            entries = store.xrange("tidegate:{usage}:rows")
        rows = [json.loads(next(iter(entry.values()))) for _, entry in entries]
        return [row for row in rows if all(row[key] == value for key, value in wanted.items())]

    def _store_socket(self) -> str:
        sockets = [c.laddr for c in self._child("valkey-server").net_connections("unix") if c.laddr]
        found = [path for path in sockets if path.endswith("store.sock")]
        if not found:
            raise ProcessLookupError("the store does not listen yet")
        return found[0]

    def kill(self, name: str) -> int:
        """kill -9 the child whose command line holds `name`; its process id."""
        child = self._child(name)
        child.send_signal(signal.SIGKILL)
        return child.pid

    def _child(self, name: str) -> psutil.Process:
        children = psutil.Process(self.process.pid).children(recursive=True)
        found = [c for c in children if c.is_running() and name in " ".join(_cmdline(c))]
        if not found:
            raise ProcessLookupError(f"no child process is called {name}")
        return found[0]

    def child_pid(self, name: str) -> int:
        return self._child(name).pid

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.terminate()
        return self.process.wait(timeout=30)


def _cmdline(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _event_data(connection: socket.socket) -> Iterator[str]:
    """Data lines of a chunked event stream. Enough for lines that hold no chunk border's look-alike."""
    buffer = b""
    while block := connection.recv(65536):
        buffer += block
        *lines, buffer = buffer.split(b"\n")
        for line in lines:
            if line.startswith(b"data: "):
                yield line[6:].rstrip(b"\r").decode()


@contextmanager
def serving(folder: Path, config: str) -> Iterator[Tidegate]:
    """A server that is ready, and stopped cleanly at the end."""
    server = Tidegate(folder, config)
    try:
        wait_until(server.ready, 120, "readiness")
        yield server
    finally:
        code = server.stop()
    assert code == 0, server.log.read_text()


@dataclass
class Upstream:
    """An OpenAI-compatible server for fallback tests. `mode`: ok, refuse (503), cut (after two deltas), hang."""

    mode: str = "ok"
    requests: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    url: str = ""


@contextmanager
def upstream() -> Iterator[Upstream]:
    state = Upstream()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            pass

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            state.requests.append(body)
            if state.mode == "refuse":
                return self._json(503, {"error": {"message": "down", "type": "x", "code": None}})
            if body.get("stream"):
                return self._events(state.mode)
            message = {"role": "assistant", "content": "from upstream"}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            return self._json(200, _whole(choice))

        def _json(self, status: int, value: Any) -> None:
            data = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def _events(self, mode: str) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.send_header("connection", "close")
            self.end_headers()
            self.close_connection = True
            for text in ("from ", "upstream"):
                self._event({"index": 0, "delta": {"content": text}, "finish_reason": None})
            if mode == "ok":
                self._event({"index": 0, "delta": {}, "finish_reason": "stop"})
                self.wfile.write(b"data: [DONE]\n\n")

        def _event(self, choice: dict[str, Any]) -> None:
            value = _whole(choice) | {"object": "chat.completion.chunk"}
            value.pop("usage")
            self.wfile.write(b"data: " + json.dumps(value).encode() + b"\n\n")

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _whole(choice: dict[str, Any]) -> dict[str, Any]:
    usage = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
    return {
        "id": "chatcmpl-up",
        "object": "chat.completion",
        "created": 1_700_000_000,
        "model": "up-model",
        "choices": [choice],
        "usage": usage,
    }
