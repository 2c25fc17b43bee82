"""Usage rows on their way to the store: bounded, patient, each written once."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from cache.embedded import EmbeddedStore
from cache.store import Store
from cache.usage_stream import UsageStream
from gateway.usage_writer import KEEP_S, UsageWriter
from plugins.events import Usage
from plugins.interfaces import UsageRecord
from plugins.testing import VirtualClock

pytestmark = pytest.mark.anyio


def row(number: int) -> UsageRecord:
    return UsageRecord(
        *(f"req_{number}", "web", "chat", "demo", "local/demo", 200, "ok", False, "standard", 1),
        *(Usage(prompt_tokens=1), 1_700_000_000.0, None, 5.0),
    )


async def stored_ids(store: Store) -> list[str]:
    return [r.request_id for _, r in await UsageStream(store).read(count=100_000)]


@asynccontextmanager
async def cutting_proxy(store_server: EmbeddedStore, path: str, seed: int) -> AsyncIterator[None]:
    """A way to the server that breaks each connection after a random number of bytes, of requests or of replies."""
    rng = random.Random(seed)
    tasks: set[asyncio.Task[None]] = set()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, budget: int) -> None:
        while budget > 0 and (data := await reader.read(4096)):
            writer.write(data[:budget])
            await writer.drain()
            budget -= len(data)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        up_reader, up_writer = await asyncio.open_unix_connection(urlsplit(store_server.url).path)
        ways = [
            asyncio.create_task(pump(reader, up_writer, rng.randrange(1, 2_000_000))),
            asyncio.create_task(pump(up_reader, writer, rng.randrange(20, 200))),
        ]
        with suppress(OSError):
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
        for end in (writer, up_writer):
            end.transport.abort()
        tasks.discard(task)

    proxy = await asyncio.start_unix_server(serve, path)
    yield
    proxy.close()
    await asyncio.gather(*tasks)


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_ten_thousand_rows_arrive_once_each_over_a_connection_that_keeps_breaking(
    store_server: EmbeddedStore, store: Store, tmp_path: Path, seed: int
) -> None:
    way = f"{tempfile.mkdtemp(prefix='tg')}/cut.sock"
    async with cutting_proxy(store_server, way, seed):
        broken = Store(f"unix://{way}", timeout_ms=5_000, max_probe_interval_s=0.001)
        writer = UsageWriter(UsageStream(broken), retry_interval_s=0.002)
        await writer.start()
        for number in range(10_000):
            writer.add(row(number))
        await writer.aclose(timeout_s=30)
        await broken.aclose()
    shutil.rmtree(Path(way).parent)
    assert await stored_ids(store) == [f"req_{n}" for n in range(10_000)]
    assert writer.dropped == 0


async def test_rows_wait_while_the_store_is_frozen_and_arrive_when_it_thaws(
    store_server: EmbeddedStore, store: Store
) -> None:
    hurried = Store(store_server.url, timeout_ms=50, max_probe_interval_s=0.01)
    writer = UsageWriter(UsageStream(hurried), flush_interval_s=0.001, retry_interval_s=0.01)
    await writer.start()
    assert store_server.pid is not None
    os.kill(store_server.pid, signal.SIGSTOP)
    try:
        for number in range(1000):
            writer.add(row(number))
        await asyncio.sleep(0.2)  # some tries fail
        assert not hurried.healthy
    finally:
        os.kill(store_server.pid, signal.SIGCONT)
    await writer.aclose(timeout_s=30)
    await hurried.aclose()
    assert await stored_ids(store) == [f"req_{n}" for n in range(1000)]


async def test_rows_beyond_the_bound_are_dropped_counted_and_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    writer = UsageWriter(UsageStream(Store("unix:///nowhere", 100)), max_waiting=5)
    for number in range(8):
        writer.add(row(number))
    assert writer.dropped == 3
    assert [r.getMessage() for r in caplog.records] == [
        "usage: rows are dropped, 5 wait for the store already"
    ]


async def test_rows_that_the_store_never_takes_are_reported_lost_at_shutdown(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = Store("unix:///nowhere", 100)
    writer = UsageWriter(UsageStream(store))
    await writer.start()
    writer.add(row(1))
    await writer.aclose(timeout_s=0.05)
    await store.aclose()
    assert writer.dropped == 1
    assert "usage: 1 rows were lost at shutdown" in caplog.text


class ForgetfulStream:
    """A store that a crash takes back to an earlier batch. Follows the script's rules."""

    def __init__(self) -> None:
        self.batches: dict[int, list[str]] = {}

    async def append(
        self, number: int, rows: list[UsageRecord], *, after_gap: bool = False
    ) -> tuple[int, bool]:
        cursor = max(self.batches, default=0)
        if number <= cursor or (number > cursor + 1 and not after_gap):
            return cursor, False
        self.batches[number] = [r.request_id for r in rows]
        return number, True

    def ids(self) -> list[str]:
        return [name for number in sorted(self.batches) for name in self.batches[number]]


async def _written(writer: UsageWriter, *numbers: int) -> None:
    for number in numbers:
        writer.add(row(number))
        await writer._write()


async def test_what_a_crash_of_the_store_took_back_is_sent_again_in_order() -> None:
    stream, clock = ForgetfulStream(), VirtualClock()
    writer = UsageWriter(stream, clock=clock)  # type: ignore[arg-type]
    await _written(writer, 1, 2, 3)
    del stream.batches[2], stream.batches[3]
    await _written(writer, 4)
    assert stream.ids() == ["req_1", "req_2", "req_3", "req_4"]


async def test_a_quiet_writer_notices_the_loss_too() -> None:
    stream, clock = ForgetfulStream(), VirtualClock()
    writer = UsageWriter(stream, clock=clock)  # type: ignore[arg-type]
    await _written(writer, 1, 2)
    stream.batches.clear()
    await writer._write()
    assert stream.ids() == ["req_1", "req_2"]


async def test_what_is_surely_on_disk_is_not_kept() -> None:
    stream, clock = ForgetfulStream(), VirtualClock()
    writer = UsageWriter(stream, clock=clock)  # type: ignore[arg-type]
    await _written(writer, 1, 2)
    clock.now_s += KEEP_S
    await writer._write()
    assert not writer._kept
    stream.batches.clear()  # FLUSHALL long after: nothing to send, and writing goes on
    await _written(writer, 3)
    assert stream.ids() == ["req_3"]


class SlowStream:
    """Takes every batch, and notes how large it was."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    async def append(
        self, number: int, rows: list[UsageRecord], *, after_gap: bool = False
    ) -> tuple[int, bool]:
        self.sizes.append(len(rows))
        return number, True


async def test_batches_grow_when_more_rows_wait() -> None:
    stream = SlowStream()
    writer = UsageWriter(stream)  # type: ignore[arg-type]
    for number in range(2500):
        writer.add(row(number))
    await writer.aclose()
    assert stream.sizes == [1024, 1024, 452]
