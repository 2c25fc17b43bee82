"""Usage rows in the store: in order, capped, each batch once."""

from __future__ import annotations

import pytest

from cache.store import Store
from cache.usage_stream import UsageStream
from plugins.events import Usage
from plugins.interfaces import UsageRecord

pytestmark = pytest.mark.anyio


def row(number: int) -> UsageRecord:
    return UsageRecord(
        request_id=f"req_{number}",
        principal="web",
        dialect="chat",
        model="chat",
        target="local/demo",
        status=200,
        outcome="ok",
        stream=True,
        klass="standard",
        attempts=1,
        usage=Usage(prompt_tokens=10, completion_tokens=number),
        started_at_s=1_700_000_000.5,
        ttft_ms=12.5,
        duration_ms=99.0,
    )


async def ids(stream: UsageStream) -> list[str]:
    return [record.request_id for _, record in await stream.read()]


async def test_rows_come_back_whole_and_in_order(store: Store) -> None:
    stream = UsageStream(store)
    await stream.append(1, [row(1), row(2)])
    await stream.append(2, [row(3)])
    assert [record for _, record in await stream.read()] == [row(1), row(2), row(3)]


async def test_a_batch_sent_twice_is_there_once(store: Store) -> None:
    stream = UsageStream(store)
    await stream.append(1, [row(1), row(2)])
    await stream.append(1, [row(1), row(2)])
    await stream.append(2, [row(3)])
    assert await ids(stream) == ["req_1", "req_2", "req_3"]


async def test_two_writers_do_not_take_each_other_for_a_retry(store: Store) -> None:
    first, second = UsageStream(store), UsageStream(store)
    await first.append(1, [row(1)])
    await second.append(1, [row(2)])
    assert await ids(first) == ["req_1", "req_2"]


async def test_reading_goes_on_after_the_last_id(store: Store) -> None:
    stream = UsageStream(store)
    await stream.append(1, [row(n) for n in range(5)])
    first = await stream.read(count=3)
    rest = await stream.read(after=first[-1][0])
    assert [record.request_id for _, record in rest] == ["req_3", "req_4"]


async def test_an_empty_stream_reads_as_no_rows(store: Store) -> None:
    assert await UsageStream(store).read() == []


async def test_the_stream_is_capped_and_the_oldest_rows_go(store: Store) -> None:
    stream = UsageStream(store, max_rows=100)
    for number in range(10):
        await stream.append(number + 1, [row(number * 100 + n) for n in range(100)])
    kept = await ids(stream)
    assert 100 <= len(kept) < 400  # whole nodes of the stream go at a time
    assert kept[-1] == "req_999"


async def test_the_cursor_of_a_writer_that_went_away_expires(store: Store) -> None:
    await UsageStream(store).append(1, [row(1)])
    (cursor,) = await store.call("KEYS", "tidegate:{usage}:cursor:*")
    assert 0 < await store.call("TTL", cursor) <= 86_400


async def test_all_keys_of_the_script_share_a_hash_tag(store: Store) -> None:
    await UsageStream(store).append(1, [row(1)])
    keys = await store.call("KEYS", "*")
    assert len(keys) == 2
    assert len({await store.call("CLUSTER", "KEYSLOT", key) for key in keys}) == 1
