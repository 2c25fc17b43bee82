"""The store client: shared writes, deadlines, the breaker, and what it says when things go wrong."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import traceback
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio
import pytest

from cache.embedded import EmbeddedStore
from cache.scripts import Script
from cache.server_binary import find_server_binary
from cache.store import Store
from plugins.errors import StoreUnavailable

pytestmark = pytest.mark.anyio

AMPLE_MS = 10_000.0
SHORT_MS = 150.0


@pytest.fixture
async def hurried(store_server: EmbeddedStore) -> AsyncIterator[Store]:
    """A client with a short deadline that has just spoken to the server."""
    store = Store(store_server.url, timeout_ms=SHORT_MS, max_probe_interval_s=0.02)
    while not store.healthy:
        with suppress(StoreUnavailable):
            await store.ping()
    yield store
    await store.aclose()


@pytest.fixture
def frozen(store_server: EmbeddedStore) -> Iterator[int]:
    """The server's process id; it runs again after the test."""
    assert store_server.pid is not None
    pid = store_server.pid
    os.kill(pid, signal.SIGSTOP)
    yield pid
    os.kill(pid, signal.SIGCONT)


async def outcomes(store: Store, count: int) -> list[object]:
    calls = [store.call("INCR", "n") for _ in range(count)]
    return list(await asyncio.gather(*calls, return_exceptions=True))


async def recovered(store: Store) -> None:
    with anyio.fail_after(10):
        while not store.healthy:
            await asyncio.sleep(0.01)


async def reads_of_server(store: Store) -> int:
    for line in (await store.call("INFO", "stats")).decode().splitlines():
        if line.startswith("total_reads_processed:"):
            return int(line.split(":")[1])
    raise AssertionError("the server does not count its reads")


@asynccontextmanager
async def tcp_server(directory: Path, password: str) -> AsyncIterator[int]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    argv = [
        str(find_server_binary()),
        *("--port", str(port), "--bind", "127.0.0.1"),
        *("--requirepass", password, "--save", "", "--dir", str(directory)),
    ]
    async with await anyio.open_process(argv, stdout=asyncio.subprocess.DEVNULL) as process:
        yield port
        process.terminate()


async def until_it_listens(store: Store) -> None:
    with anyio.fail_after(10):
        while not store.healthy:
            with suppress(StoreUnavailable):
                await store.ping()
            await asyncio.sleep(0.01)


async def test_a_call_brings_the_reply(store: Store) -> None:
    await store.call("SET", "k", 5)
    assert await store.call("GET", "k") == b"5"
    assert store.healthy


async def test_calls_of_one_turn_share_one_write(store: Store) -> None:
    before = await reads_of_server(store)
    assert await outcomes(store, 100) == list(range(1, 101))
    assert await reads_of_server(store) - before == 2  # the hundred, and the question


async def test_calls_made_while_a_batch_is_out_go_together_in_the_next(store: Store) -> None:
    before = await reads_of_server(store)
    first = asyncio.create_task(store.call("INCR", "n"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert await outcomes(store, 50) == list(range(2, 52))
    assert await first == 1
    assert await reads_of_server(store) - before == 3


async def test_a_refused_command_fails_alone_and_does_not_repeat_its_content(store: Store) -> None:
    await store.call("SET", "k", "private")
    got = await asyncio.gather(
        store.call("INCR", "n"),
        store.call("INCR", "k"),
        store.call("INCR", "n"),
        return_exceptions=True,
    )
    assert got[0] == 1
    assert got[2] == 2
    assert isinstance(got[1], StoreUnavailable)
    assert str(got[1]) == "the store refused INCR: value"


async def test_a_cancelled_call_leaves_its_neighbours_alone(store: Store) -> None:
    cancelled = asyncio.create_task(store.call("INCR", "n"))
    kept = asyncio.create_task(store.call("INCR", "n"))
    await asyncio.sleep(0)
    cancelled.cancel()
    assert await kept == 2
    assert await store.call("INCR", "n") == 3


async def test_keys_carry_the_prefix(store_server: EmbeddedStore) -> None:
    store = Store(store_server.url, timeout_ms=AMPLE_MS, key_prefix="staging:")
    assert store.key("{usage}:rows") == "staging:{usage}:rows"
    await store.aclose()


ADD = Script("add", "return redis.call('INCRBY', KEYS[1], ARGV[1])")


async def test_a_script_runs_by_its_hash(store: Store) -> None:
    assert await store.run(ADD, ["n"], [2]) == 2
    assert await store.run(ADD, ["n"], [3]) == 5


async def test_a_script_that_the_server_forgot_is_loaded_again(store: Store) -> None:
    await store.run(ADD, ["n"], [2])
    await store.call("SCRIPT", "FLUSH")
    got = await asyncio.gather(
        store.run(ADD, ["n"], [2]), store.call("PING"), store.run(ADD, ["n"], [2])
    )
    assert got == [4, b"PONG", 6]


async def test_a_frozen_server_costs_a_call_its_deadline(hurried: Store, frozen: int) -> None:
    with pytest.raises(StoreUnavailable, match="did not answer within 150 ms"):
        await hurried.ping()
    assert not hurried.healthy


async def test_after_three_failures_calls_fail_without_waiting(hurried: Store, frozen: int) -> None:
    for _ in range(3):
        with pytest.raises(StoreUnavailable, match="did not answer within"):
            await hurried.ping()
    with pytest.raises(StoreUnavailable, match="the store does not answer"):
        hurried.ping().send(None)  # fails in its first step


async def test_callers_that_queue_behind_a_frozen_batch_fail_with_the_breaker(
    hurried: Store, frozen: int
) -> None:
    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            for delay_s in (0.0, 0.05, 0.1, 0.2):

                async def call_later(delay_s: float = delay_s) -> None:
                    await asyncio.sleep(delay_s)
                    with pytest.raises(StoreUnavailable):
                        await hurried.ping()

                group.start_soon(call_later)


async def test_a_thawed_server_is_found_again(hurried: Store, frozen: int) -> None:
    for _ in range(3):
        with pytest.raises(StoreUnavailable):
            await hurried.ping()
    os.kill(frozen, signal.SIGCONT)
    await recovered(hurried)


async def test_replies_that_come_too_late_never_reach_other_calls(
    hurried: Store, frozen: int
) -> None:
    with pytest.raises(StoreUnavailable):
        await hurried.call("ECHO", "late")
    os.kill(frozen, signal.SIGCONT)
    with anyio.fail_after(10):
        while True:
            with suppress(StoreUnavailable):
                assert await hurried.call("ECHO", "fresh") == b"fresh"
                break


async def test_a_restarted_server_is_used_by_the_very_next_call(
    store: Store, store_server: EmbeddedStore
) -> None:
    await store.call("SET", "k", "kept")
    await store.call("WAITAOF", 1, 0, 5000)  # written every second: a kill may cost the last one
    assert store_server.pid is not None
    os.kill(store_server.pid, signal.SIGKILL)
    await store_server.wait()
    await store_server.start()
    assert await store.call("GET", "k") == b"kept"


async def test_a_server_that_is_gone_opens_the_breaker_and_comes_back(
    hurried: Store, store_server: EmbeddedStore
) -> None:
    await store_server.stop()
    for _ in range(3):
        with pytest.raises(StoreUnavailable, match="cannot be used: ConnectionError"):
            await hurried.ping()
    with pytest.raises(StoreUnavailable, match="does not answer"):
        await hurried.ping()
    await store_server.start()
    await recovered(hurried)


async def test_a_server_that_goes_is_noticed_while_nobody_calls(
    store_server: EmbeddedStore,
) -> None:
    store = Store(
        store_server.url, timeout_ms=AMPLE_MS, heartbeat_s=0.01, max_probe_interval_s=0.01
    )
    await store.start()
    assert store.healthy
    await store_server.stop()
    with anyio.fail_after(10):
        while store.healthy:
            await asyncio.sleep(0.01)
    await store_server.start()
    await recovered(store)
    await store.aclose()


async def test_starting_without_a_server_is_no_failure() -> None:
    store = Store("unix:///nowhere", timeout_ms=AMPLE_MS)
    await store.start()
    assert not store.healthy
    await store.aclose()


async def test_closing_fails_the_calls_that_still_wait(
    store_server: EmbeddedStore, frozen: int
) -> None:
    store = Store(store_server.url, timeout_ms=AMPLE_MS)
    waiting = asyncio.create_task(store.ping())
    await asyncio.sleep(0.01)
    await store.aclose()
    with pytest.raises(StoreUnavailable, match="closed"):
        await waiting
    with pytest.raises(StoreUnavailable, match="closed"):
        await store.ping()


@pytest.mark.parametrize("url", ["redis://me:hunter2/x@host", "http://me:hunter2@host", "hunter2"])
def test_a_url_that_is_none_is_refused_without_repeating_it(url: str) -> None:
    with pytest.raises(StoreUnavailable) as caught:
        Store(url, timeout_ms=AMPLE_MS)
    assert "hunter2" not in "".join(traceback.format_exception(caught.value))


async def test_a_tcp_server_with_a_password_is_logged_in_to(tmp_path: Path) -> None:
    async with tcp_server(tmp_path, password="hunter2") as port:
        store = Store(f"redis://:hunter2@127.0.0.1:{port}/1", timeout_ms=AMPLE_MS)
        await until_it_listens(store)
        assert await store.call("SET", "k", "v") == b"OK"
        await store.aclose()


async def test_a_wrong_password_is_reported_but_not_shown(tmp_path: Path) -> None:
    async with tcp_server(tmp_path, password="hunter2") as port:
        right = Store(f"redis://:hunter2@127.0.0.1:{port}", timeout_ms=AMPLE_MS)
        await until_it_listens(right)
        await right.aclose()
        store = Store(f"redis://:swordfish@127.0.0.1:{port}", timeout_ms=AMPLE_MS)
        with pytest.raises(StoreUnavailable, match="AuthenticationError") as caught:
            await store.ping()
        await store.aclose()
    assert "swordfish" not in "".join(traceback.format_exception(caught.value))
