"""One usage row for every request: what it says, and that it arrives exactly once."""

from __future__ import annotations

import asyncio

import anyio
import pytest

from cache.store import Store
from cache.usage_stream import UsageStream
from gateway.accounting import Accounting, RequestMeter, estimate_prompt_tokens
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


class Sink:
    def __init__(self) -> None:
        self.seen: list[str] = []

    async def on_usage(self, record: UsageRecord) -> None:
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
