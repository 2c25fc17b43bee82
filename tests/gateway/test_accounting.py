"""One usage row for every request: what it says, and that it arrives exactly once."""

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

import anyio
import pytest

from cache.embedded import EmbeddedStore
from cache.store import Store
from cache.usage_stream import UsageStream
from gateway.accounting import Accounting, RequestMeter, estimate_prompt_tokens
from gateway.observers import ObserverQueue
from gateway.usage_writer import UsageWriter
from plugins.errors import (
    InvalidRequest,
    Overloaded,
    PluginFailed,
    QuotaExceeded,
    UpstreamError,
    UpstreamTimeout,
)
from plugins.events import (
    Event,
    Finished,
    Media,
    Message,
    ReasoningDelta,
    Request,
    Started,
    Text,
    TextDelta,
    Usage,
    Verbatim,
)
from plugins.interfaces import Principal, UsageRecord
from plugins.manager import PluginRules

pytestmark = pytest.mark.anyio


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Rows(list[UsageRecord]):
    """Stands where the metrics stand: hears of every row at once."""

    def record(self, row: UsageRecord) -> None:
        self.append(row)


@pytest.fixture(scope="module")
async def server() -> AsyncIterator[EmbeddedStore]:
    base = Path(tempfile.mkdtemp(prefix="tg"))
    server = EmbeddedStore(base / "data", base / "run")
    await server.start()
    yield server
    await server.stop()
    shutil.rmtree(base)


@pytest.fixture
async def store(server: EmbeddedStore) -> AsyncIterator[Store]:
    store = Store(server.url, timeout_ms=10_000)
    await store.call("FLUSHALL")
    yield store
    await store.aclose()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def rows() -> Rows:
    return Rows()


@pytest.fixture
def accounting(clock: Clock, rows: Rows) -> Accounting:
    """Not started: the rows are looked at where they are recorded."""
    return Accounting(Store("unix:///nowhere", 100), [], rows, clock, lambda: 1_700_000_000.0)


def open_meter(accounting: Accounting, **fields: object) -> RequestMeter:
    request = Request("req_1", "chat", "demo", received_s=100.0, **fields)
    return RequestMeter(request, Principal("web"), accounting)


def row(number: int) -> UsageRecord:
    return UsageRecord(
        *(f"req_{number}", "web", "chat", "demo", "local/demo", 200, "ok", False, "standard", 1),
        *(Usage(prompt_tokens=1), 1_700_000_000.0, None, 5.0),
    )


# -- The meter ---------------------------------------------------------------------------------------------------------


def test_a_row_tells_what_was_asked_and_what_it_came_to(
    accounting: Accounting, rows: Rows, clock: Clock
) -> None:
    meter = open_meter(accounting, stream=True)
    meter.target_chosen("first/demo")
    meter.target_chosen("second/demo")
    clock.now_s = 100.25
    meter.on_events([Started("c", "m", 1), TextDelta("hi")])
    clock.now_s = 101.0
    usage = Usage(prompt_tokens=7, completion_tokens=3, cached_tokens=2)
    meter.on_events([Finished("stop"), usage])
    meter.close(200, "ok")
    assert rows == [
        UsageRecord(
            request_id="req_1",
            principal="web",
            dialect="chat",
            model="demo",
            target="second/demo",
            status=200,
            outcome="ok",
            stream=True,
            klass="standard",
            attempts=2,
            usage=usage,
            started_at_s=1_700_000_000.0,
            ttft_ms=250.0,
            duration_ms=1000.0,
        )
    ]


def test_only_the_first_close_writes_a_row(accounting: Accounting, rows: Rows) -> None:
    meter = open_meter(accounting)
    meter.close(499, "cancelled")
    meter.close(200, "ok")
    assert [(r.status, r.outcome) for r in rows] == [(499, "cancelled")]


def test_requests_in_flight_are_counted_until_they_close(accounting: Accounting) -> None:
    meter = open_meter(accounting)
    assert accounting.requests_in_flight == 1
    meter.close(200, "ok")
    meter.close(200, "ok")
    assert accounting.requests_in_flight == 0


def test_a_cancelled_stream_without_usage_is_estimated_from_its_chunks(
    accounting: Accounting, rows: Rows
) -> None:
    meter = open_meter(accounting, messages=[Message("user", [Text("x" * 40)])])
    meter.target_chosen("local/demo")
    meter.on_events([TextDelta("a"), ReasoningDelta("b")])
    meter.on_events([Verbatim(b"data: {}\n\n", num_chunks=3)])
    meter.close(499, "cancelled")
    assert rows[0].usage == Usage(prompt_tokens=10, completion_tokens=5, estimated=True)


def test_reported_usage_beats_the_estimate_even_when_it_is_zero(
    accounting: Accounting, rows: Rows
) -> None:
    meter = open_meter(accounting)
    meter.target_chosen("local/demo")
    meter.on_events([TextDelta("a"), Usage()])
    meter.close(200, "ok")
    assert rows[0].usage == Usage(estimated=False)


@pytest.mark.parametrize("outcome", ["error", "rejected"])
def test_a_failure_before_content_costs_nothing(
    accounting: Accounting, rows: Rows, outcome: str
) -> None:
    meter = open_meter(accounting, body=b"x" * 400)
    meter.target_chosen("local/demo")
    meter.close(502, outcome, "upstream_unavailable")
    assert rows[0].usage == Usage()
    assert rows[0].error_code == "upstream_unavailable"


def test_a_request_that_reached_no_target_used_nothing(accounting: Accounting, rows: Rows) -> None:
    meter = open_meter(accounting, body=b"x" * 400)
    meter.close(499, "cancelled")
    assert rows[0].usage == Usage()
    assert rows[0].target == ""


def test_bytes_without_content_do_not_start_the_clock_of_the_first_token(
    accounting: Accounting, rows: Rows
) -> None:
    meter = open_meter(accounting)
    meter.on_events([Started("c", "m", 1), Verbatim(b"data: {}\n\n", has_content=False)])
    assert not meter.has_content
    meter.close(499, "cancelled")
    assert rows[0].ttft_ms is None


def test_a_models_name_is_stored_at_a_length_and_without_broken_characters(
    accounting: Accounting, rows: Rows
) -> None:
    request = Request("req_1", "chat", "\ud800" + "m" * 10_000)
    RequestMeter(request, Principal("web"), accounting).close(404, "rejected")
    assert rows[0].model == "?" + "m" * 199


@pytest.mark.parametrize(
    ("error", "events", "outcome"),
    [
        (InvalidRequest("no"), [], "rejected"),
        (QuotaExceeded("no"), [], "rejected"),
        (Overloaded("full"), [], "rejected"),
        (PluginFailed("broken"), [], "error"),
        (UpstreamError("no", status=400), [], "error"),
        (UpstreamTimeout("late"), [TextDelta("a")], "error"),
        (Overloaded("full"), [TextDelta("a")], "error"),
    ],
)
def test_an_outcome_tells_a_refusal_from_a_failure(
    accounting: Accounting, error: InvalidRequest, events: list[Event], outcome: str
) -> None:
    meter = open_meter(accounting)
    meter.on_events(events)
    assert meter.outcome_of(error) == outcome


@pytest.mark.parametrize(
    ("request_", "tokens"),
    [
        (Request("r", "completions", "m", prompts=[[1, 2, 3], "abcdefgh"]), 5),
        (Request("r", "chat", "m", messages=[Message("user", [Text("ä" * 8)])]), 4),
        (
            Request(
                *("r", "chat", "m"),
                messages=[Message("user", [Text("abcd"), Media("image", data_base64="x" * 999)])],
            ),
            1,
        ),
        (Request("r", "chat", "m", body=b"x" * 40), 10),
    ],
    ids=["token ids and text", "bytes, not characters", "no media", "undecoded body"],
)
def test_a_prompt_is_estimated_from_what_is_known_of_it(request_: Request, tokens: int) -> None:
    assert estimate_prompt_tokens(request_) == tokens


# -- Into the store ----------------------------------------------------------------------------------------------------


async def stored_ids(store: Store) -> list[str]:
    return [r.request_id for _, r in await UsageStream(store).read(count=100_000)]


async def test_recorded_rows_reach_the_store_by_themselves(store: Store, rows: Rows) -> None:
    accounting = Accounting(store, [], rows)
    await accounting.start()
    accounting.record(row(1))
    with anyio.fail_after(10):
        while await stored_ids(store) != ["req_1"]:
            await asyncio.sleep(0.01)
    accounting.record(row(2))
    await accounting.aclose()
    assert await stored_ids(store) == ["req_1", "req_2"]
    assert rows == [row(1), row(2)]


@asynccontextmanager
async def cutting_proxy(server: EmbeddedStore, path: str, seed: int) -> AsyncIterator[None]:
    """A way to the server that breaks each connection after a random number of bytes, one way or the other."""
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
        up_reader, up_writer = await asyncio.open_unix_connection(urlsplit(server.url).path)
        ways = [
            asyncio.create_task(pump(reader, up_writer, rng.randrange(1, 400_000))),
            asyncio.create_task(pump(up_reader, writer, rng.randrange(20, 60))),
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
    server: EmbeddedStore, store: Store, tmp_path: Path, seed: int
) -> None:
    way = f"{tempfile.mkdtemp(prefix='tg')}/cut.sock"
    async with cutting_proxy(server, way, seed):
        broken = Store(f"unix://{way}", timeout_ms=5_000, max_probe_interval_s=0.001)
        writer = UsageWriter(UsageStream(broken), retry_interval_s=0.002)
        await writer.start()
        for number in range(10_000):
            writer.add(row(number))
        await writer.aclose(timeout_s=60)
        await broken.aclose()
    shutil.rmtree(Path(way).parent)
    assert await stored_ids(store) == [f"req_{n}" for n in range(10_000)]
    assert writer.dropped == 0


async def test_rows_wait_while_the_store_is_frozen_and_arrive_when_it_thaws(
    server: EmbeddedStore, store: Store
) -> None:
    hurried = Store(server.url, timeout_ms=50, max_probe_interval_s=0.01)
    writer = UsageWriter(UsageStream(hurried), flush_interval_s=0.001, retry_interval_s=0.01)
    await writer.start()
    assert server.pid is not None
    os.kill(server.pid, signal.SIGSTOP)
    try:
        for number in range(1000):
            writer.add(row(number))
        await asyncio.sleep(0.2)  # some tries fail
        assert not hurried.healthy
    finally:
        os.kill(server.pid, signal.SIGCONT)
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


# -- To the observers --------------------------------------------------------------------------------------------------


class Sink:
    def __init__(self) -> None:
        self.seen: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def on_usage(self, record: UsageRecord) -> None:
        await self.gate.wait()
        if record.request_id == "req_0":
            raise ValueError("not this one")
        self.seen.append(record.request_id)


async def test_every_observer_hears_of_every_row(store: Store, rows: Rows) -> None:
    sinks = [Sink(), Sink()]
    observers = [(PluginRules("one"), sinks[0]), (PluginRules("two"), sinks[1])]
    accounting = Accounting(store, observers, rows)
    await accounting.start()
    accounting.record(row(1))
    accounting.record(row(2))
    await accounting.aclose()
    assert [sink.seen for sink in sinks] == [["req_1", "req_2"]] * 2


async def test_a_stuck_observer_loses_records_and_holds_up_nobody() -> None:
    stuck, quick = Sink(), Sink()
    stuck.gate.clear()
    queues = [ObserverQueue(PluginRules("x"), sink, max_waiting=3) for sink in (stuck, quick)]
    for queue in queues:
        await queue.start()
    for number in range(1, 11):
        for queue in queues:
            queue.offer(row(number))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert len(quick.seen) == 10
    assert queues[0].dropped == 6  # one in hand, three waiting
    for queue in queues:
        await queue.aclose(timeout_s=0.01)


async def test_a_failing_observer_is_told_of_the_next_record_all_the_same(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sink = Sink()
    queue = ObserverQueue(PluginRules("sink"), sink)
    await queue.start()
    for number in (0, 0, 1):
        queue.offer(row(number))
    await queue.aclose()
    assert sink.seen == ["req_1"]
    assert caplog.messages == ["plugin sink: observer failed: ValueError: not this one"]


async def test_an_observer_that_takes_longer_than_its_timeout_is_cut_off() -> None:
    sink = Sink()
    sink.gate.clear()
    queue = ObserverQueue(PluginRules("sink", timeout_s=0.01), sink)
    await queue.start()
    queue.offer(row(1))
    await asyncio.sleep(0.05)
    sink.gate.set()
    queue.offer(row(2))
    await queue.aclose()
    assert sink.seen == ["req_2"]
