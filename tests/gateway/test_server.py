"""A real worker process, told what to do over its standard input as the supervisor does it."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cache.server_binary import find_server_binary
from gateway.control import ConfigSource, WorkerOrder, encode_frame
from gateway.listeners import open_listeners

PLUGIN = Path(__file__).parent / "data" / "gated.py"
ROOT = Path(__file__).parents[2]
CHAT = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "hi"}]}


def config_text(folder: Path, models: str = "m", grace_s: float = 20) -> str:
    return f"""
[server]
shutdown_grace_s = {grace_s}
[auth]
mode = "open"
[plugins]
enabled = ["{PLUGIN}"]
[[providers]]
name = "up"
type = "gated"
options = {{ gate = "{folder / "gate"}" }}
[[models]]
name = "{models}"
targets = ["up/x"]
"""


@pytest.fixture(scope="module")
def store_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    path = tmp_path_factory.mktemp("store") / "s"
    options = ("--port", "0", "--unixsocket", str(path), "--save", "", "--dir", str(path.parent))
    with subprocess.Popen((find_server_binary(), *options), stdout=subprocess.DEVNULL) as store:
        yield f"unix://{path}"
        store.terminate()


class Worker:
    def __init__(self, folder: Path, store_url: str) -> None:
        self.folder = folder
        self.store_url = store_url
        [self.listener] = open_listeners("127.0.0.1", 0, 1)
        self.port = self.listener.getsockname()[1]
        self.process = subprocess.Popen(
            (sys.executable, "-m", "gateway.server"),
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(self.listener.fileno(),),
            env={**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"},
        )

    def order(self, text: str) -> None:
        assert self.process.stdin is not None
        config = ConfigSource(text, str(self.folder / "config.toml"))
        fd, run_dir = self.listener.fileno(), str(self.folder)
        frame = encode_frame(WorkerOrder(config, fd, self.store_url, run_dir))
        self.process.stdin.write(frame)
        self.process.stdin.flush()

    def get(self, path: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        connection.request("GET", path)
        answer = connection.getresponse()
        body = answer.read().decode()
        connection.close()
        return answer.status, body

    def open_stream(self) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """A chat stream of which the first content has come, and which waits for the gate."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        headers = {"content-type": "application/json"}
        connection.request("POST", "/v1/chat/completions", json.dumps(CHAT), headers)
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        while b"one" not in (line := answer.readline()):
            assert line, "the stream ended before its first content"
        return connection, answer

    def stop_listening(self) -> None:
        self.listener.close()

    def errors(self) -> str:
        assert self.process.stderr is not None
        return self.process.stderr.read().decode()


@pytest.fixture
def worker(tmp_path: Path, store_url: str) -> Iterator[Worker]:
    worker = Worker(tmp_path, store_url)
    yield worker
    worker.process.kill()
    worker.process.wait()
    for pipe in (worker.process.stdin, worker.process.stderr):
        assert pipe is not None
        pipe.close()
    worker.stop_listening()


def refuses_connections(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except ConnectionRefusedError:
        return True
    return False


@pytest.mark.slow
def test_a_worker_serves_and_takes_over_a_reloaded_config(worker: Worker) -> None:
    worker.order(config_text(worker.folder))
    assert worker.get("/livez")[0] == 200
    assert worker.get("/readyz")[0] == 200
    assert [m["id"] for m in json.loads(worker.get("/v1/models")[1])["data"]] == ["m"]
    worker.order(config_text(worker.folder, models="renamed"))
    while "renamed" not in worker.get("/v1/models")[1]:
        time.sleep(0.01)


@pytest.mark.slow
def test_a_faulty_reload_keeps_the_old_config_and_says_why(worker: Worker) -> None:
    worker.order(config_text(worker.folder))
    worker.order("prot = 1\n" + config_text(worker.folder, models="renamed"))
    worker.order(config_text(worker.folder, models="third"))
    while "third" not in worker.get("/v1/models")[1]:
        time.sleep(0.01)
    worker.process.terminate()
    assert "prot: unknown key" in worker.errors()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["SIGTERM", "SIGINT", "supervisor gone"])
def test_a_running_stream_ends_whole_while_new_connections_are_refused(
    worker: Worker, how: str
) -> None:
    worker.order(config_text(worker.folder))
    connection, answer = worker.open_stream()
    worker.stop_listening()
    if how == "supervisor gone":
        assert worker.process.stdin is not None
        worker.process.stdin.close()
    else:
        worker.process.send_signal(signal.Signals[how])
    while not refuses_connections(worker.port):
        time.sleep(0.01)
    assert worker.process.poll() is None
    (worker.folder / "gate").touch()
    text = answer.read().decode()
    assert "two" in text
    assert text.endswith("data: [DONE]\n\n")
    assert worker.process.wait() == 0
    connection.close()


@pytest.mark.slow
def test_a_stream_that_outlasts_the_grace_time_is_cut(worker: Worker) -> None:
    worker.order(config_text(worker.folder, grace_s=0.1))
    connection, answer = worker.open_stream()
    worker.stop_listening()
    worker.process.terminate()
    try:
        text = answer.read().decode()
    except http.client.IncompleteRead as exc:
        text = exc.partial.decode()
    assert "two" not in text
    assert worker.process.wait() == 0
    connection.close()


@pytest.mark.slow
def test_a_fault_in_the_config_ends_the_worker_with_2_and_one_line_for_each(
    worker: Worker,
) -> None:
    worker.order("prot = 1\nprit = 2\n" + config_text(worker.folder))
    assert worker.process.wait() == 2
    lines = worker.errors().splitlines()
    assert [line.rpartition("config.toml")[2].partition(";")[0] for line in lines] == [
        ":1: prot: unknown key",
        ":2: prit: unknown key",
    ]


def test_a_worker_whose_supervisor_goes_before_the_order_ends_quietly(worker: Worker) -> None:
    assert worker.process.stdin is not None
    worker.process.stdin.close()
    assert worker.process.wait() == 0
    assert not worker.errors()
