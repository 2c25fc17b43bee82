from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from gateway.child import Backoff
from gateway.control import ConfigSource
from gateway.supervisor import Start, Supervisor, prepare_start
from plugins.interfaces import ProcessSpec

STUB = str(Path(__file__).with_name("stub_worker.py"))
TEXT = """
[server]
port = 0
workers = 1
shutdown_grace_s = 5
[auth]
mode = "open"
[store]
data_dir = "data"
[[providers]]
name = "up"
type = "openai_compatible"
base_url = "http://127.0.0.1:9/v1"
[[models]]
name = "m"
targets = ["up/x"]
"""


class Running:
    """A supervisor in this process, with stub workers as real child processes."""

    def __init__(self, folder: Path, text: str = TEXT, mode: str = "") -> None:
        self.path = folder / "config.toml"
        self.path.write_text(text)
        source = ConfigSource(text, str(self.path))
        self.start: Start = prepare_start(source, source.parse())
        self.mode = mode
        self.ready = asyncio.Event()
        self.store: FakeStore | None = None

    async def play(self, scenario: Callable[[], Awaitable[None]] | None = None) -> int:
        """Run the scenario once all is ready, then SIGTERM. Returns the supervisor's exit code."""
        argv = (sys.executable, STUB, *([self.mode] if self.mode else []))
        self.supervisor = Supervisor(self.start, lambda port: self.ready.set(), self.store, argv)
        running = asyncio.create_task(self.supervisor.run())
        if scenario is not None:
            await self.ready.wait()
            await scenario()
            os.kill(os.getpid(), signal.SIGTERM)
        return await running

    async def get(self, path: str) -> str:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.start.port)
        writer.write(f"GET {path} HTTP/1.1\r\n\r\n".encode())
        answer = (await reader.read()).decode()
        writer.close()
        await writer.wait_closed()
        return answer.partition("\r\n\r\n")[2]


class FakeStore:
    """A store that notes what happens to it and can be made to die."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.died = asyncio.Event()
        self.before_stop: Callable[[], None] = lambda: None

    async def start(self) -> str:
        self.log.append("start")
        self.died.clear()
        return "unix:///store.sock"

    async def wait(self) -> None:
        await self.died.wait()

    async def stop(self) -> None:
        self.before_stop()
        self.log.append("stop")


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def test_sigterm_stops_the_workers_and_ends_with_0(tmp_path: Path) -> None:
    async def play() -> None:
        running = Running(tmp_path)
        pids: list[int] = []

        async def scenario() -> None:
            pids.append(int(await running.get("/pid")))

        assert await running.play(scenario) == 0
        assert not alive(pids[0])

    asyncio.run(play())


def test_two_workers_share_the_port(tmp_path: Path) -> None:
    async def play() -> None:
        running = Running(tmp_path, TEXT.replace("workers = 1", "workers = 2"))

        async def scenario() -> None:
            seen: set[str] = set()
            while len(seen) < 2:
                seen.add(await running.get("/pid"))

        assert await running.play(scenario) == 0

    asyncio.run(play())


def test_a_killed_worker_comes_back_and_no_connection_is_refused_meanwhile(tmp_path: Path) -> None:
    async def play() -> None:
        running = Running(tmp_path)

        async def scenario() -> None:
            before = int(await running.get("/pid"))
            os.kill(before, signal.SIGKILL)
            await until(lambda: not alive(before))  # what it had accepted would be lost with it
            after = int(await running.get("/pid"))  # waits in the socket that we hold open
            assert after != before

        assert await running.play(scenario) == 0

    asyncio.run(play())


def test_a_running_request_ends_before_its_worker(tmp_path: Path) -> None:
    async def play() -> None:
        running = Running(tmp_path)
        slow: list[asyncio.Task[str]] = []

        async def scenario() -> None:
            slow.append(asyncio.create_task(running.get("/slow")))
            await asyncio.sleep(0.1)  # until the worker has it

        assert await running.play(scenario) == 0
        assert (await slow[0]).isdigit()

    asyncio.run(play())


def test_a_second_interrupt_ends_what_does_not_want_to(tmp_path: Path) -> None:
    async def play() -> None:
        running = Running(tmp_path, mode="stubborn")

        async def scenario() -> None:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(0.1)
            os.kill(os.getpid(), signal.SIGINT)

        assert await running.play(scenario) == 0

    asyncio.run(play())


def test_a_worker_that_refuses_its_config_ends_everything_with_2(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async def play() -> None:
        assert await Running(tmp_path, mode="exit-2").play() == 2

    asyncio.run(play())
    assert capfd.readouterr().err == "broken for a reason\n"


def test_a_process_that_always_dies_before_all_is_ready_ends_everything_with_1(
    tmp_path: Path,
) -> None:
    async def play() -> None:
        running = Running(tmp_path)
        running.mode = "exit-3"
        dying = ProcessSpec("dying", (sys.executable, "-c", "exit(3)"), restart_backoff_s=0.001)
        running.start.processes.append(dying)
        assert await running.play() == 1

    asyncio.run(play())


def test_a_process_of_a_provider_gets_its_input_at_each_start(tmp_path: Path) -> None:
    out = tmp_path / "out"
    code = f"import os; os.write(os.open({str(out)!r}, 1089), os.read(0, 9)); os.read(0, 1)"

    async def play() -> None:
        running = Running(tmp_path)
        argv = (sys.executable, "-c", code)
        running.start.processes.append(ProcessSpec("p", argv, stdin=b"hello ", restart_backoff_s=0))

        async def scenario() -> None:
            await until(lambda: out.exists() and out.read_bytes() == b"hello ")
            os.kill(running.supervisor._processes[0].pid or 0, signal.SIGKILL)
            await until(lambda: out.read_bytes() == b"hello hello ")

        assert await running.play(scenario) == 0

    asyncio.run(play())


def test_the_store_is_there_before_the_workers_and_goes_after_them(tmp_path: Path) -> None:
    async def play() -> None:
        running = Running(tmp_path)
        store = running.store = FakeStore()

        async def scenario() -> None:
            assert store.log == ["start"]
            pid = int(await running.get("/pid"))
            store.before_stop = lambda: store.log.append(f"worker alive: {alive(pid)}")

        assert await running.play(scenario) == 0
        assert store.log == ["start", "worker alive: False", "stop"]

    asyncio.run(play())


def test_a_store_that_dies_is_started_again(tmp_path: Path) -> None:
    async def play() -> None:
        running = Running(tmp_path)
        store = running.store = FakeStore()

        async def scenario() -> None:
            store.died.set()
            await until(lambda: store.log == ["start", "start"])

        assert await running.play(scenario) == 0

    asyncio.run(play())


def test_sighup_hands_new_models_to_the_workers(tmp_path: Path) -> None:
    async def play() -> None:
        running = Running(tmp_path)

        async def scenario() -> None:
            running.path.write_text(TEXT.replace('"m"', '"renamed"'))
            os.kill(os.getpid(), signal.SIGHUP)
            while "renamed" not in await running.get("/text"):
                await asyncio.sleep(0.01)
            pid = int(await running.get("/pid"))
            os.kill(pid, signal.SIGKILL)
            await until(lambda: not alive(pid))
            assert "renamed" in await running.get("/text")  # and to those that start later

        assert await running.play(scenario) == 0

    asyncio.run(play())


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ('"m"', "3", "models[0].name: expected a string, got an integer"),
        ("workers = 1", "workers = 2", "[server] changed; restart for that"),
        (":9/v1", ":10/v1", "[providers] changed; restart for that"),
    ],
)
def test_a_reload_that_cannot_be_done_keeps_the_old_config_and_says_why(
    tmp_path: Path, old: str, new: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def play() -> None:
        running = Running(tmp_path)

        async def scenario() -> None:
            running.path.write_text(TEXT.replace(old, new))
            await running.supervisor.reload()
            assert await running.get("/text") == TEXT

        assert await running.play(scenario) == 0

    asyncio.run(play())
    assert any("the old config stays" in m and reason in m for m in caplog.messages)


SUPERVISE = """
import asyncio, sys
from gateway.control import ConfigSource
from gateway.supervisor import Supervisor, prepare_start
text = open(sys.argv[1]).read()
source = ConfigSource(text, sys.argv[1])
start = prepare_start(source, source.parse())
announce = lambda port: print(port, flush=True)
asyncio.run(Supervisor(start, announce, None, (sys.executable, sys.argv[2])).run())
"""


@pytest.mark.slow
def test_workers_end_when_the_supervisor_is_killed(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(TEXT)
    argv = (sys.executable, "-c", SUPERVISE, str(tmp_path / "config.toml"), STUB)
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        port = int(supervisor.stdout.readline())
        children = Path(f"/proc/{supervisor.pid}/task/{supervisor.pid}/children").read_text()
        supervisor.kill()
    assert port
    worker = int(children.split()[0])
    while alive(worker):
        time.sleep(0.01)


def test_backoff_doubles_up_to_ten_seconds_and_starts_anew_after_a_long_life() -> None:
    backoff = Backoff(0.5)
    assert [backoff.after(1) for _ in range(6)] == [0.5, 1, 2, 4, 8, 10]
    assert [backoff.after(10), backoff.after(1)] == [0.5, 1]
