"""Observers of finished requests: told of every row, unable to hold anything up."""

from __future__ import annotations

import asyncio

import pytest

from gateway.observers import ObserverQueue
from plugins.events import Usage
from plugins.interfaces import UsageRecord
from plugins.manager import PluginRules

pytestmark = pytest.mark.anyio


def row(number: int) -> UsageRecord:
    return UsageRecord(
        *(f"req_{number}", "web", "chat", "demo", "local/demo", 200, "ok", False, "standard", 1),
        *(Usage(prompt_tokens=1), 1_700_000_000.0, None, 5.0),
    )


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


@pytest.mark.parametrize("exc", [SystemExit(3), asyncio.CancelledError()], ids=repr)
async def test_whatever_an_observer_raises_it_hears_of_the_next_row(exc: BaseException) -> None:
    heard: list[str] = []

    class Raises:
        async def on_usage(self, record: UsageRecord) -> None:
            heard.append(record.request_id)
            raise exc

    queue = ObserverQueue(PluginRules("x"), Raises())
    await queue.start()
    queue.offer(row(1))
    queue.offer(row(2))
    await queue.aclose()
    assert heard == ["req_1", "req_2"]
