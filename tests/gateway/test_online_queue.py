from __future__ import annotations

import anyio
import pytest

from gateway.queues.online import OnlineQueue
from plugins.errors import Overloaded
from plugins.events import Request

pytestmark = pytest.mark.anyio


def _request(klass: str = "standard") -> Request:
    return Request(id="r", dialect="chat", model="m", klass=klass)  # type: ignore[arg-type]


async def test_no_cap_lets_everybody_in() -> None:
    queue = OnlineQueue(max_waiting=0, max_wait_s=1)
    async with queue.slot("p", 0, _request()), queue.slot("p", 0, _request()):
        assert queue.in_flight("p") == 2


async def test_places_are_free_again_after_an_error() -> None:
    queue = OnlineQueue(max_waiting=0, max_wait_s=1)
    with pytest.raises(ValueError, match="inside"):
        async with queue.slot("p", 1, _request()):
            raise ValueError("inside")
    async with queue.slot("p", 1, _request()):
        assert queue.in_flight("p") == 1


async def test_beyond_max_waiting_is_refused_at_once_with_retry_after() -> None:
    queue = OnlineQueue(max_waiting=0, max_wait_s=1)
    async with queue.slot("p", 1, _request()):
        with pytest.raises(Overloaded) as caught:
            async with queue.slot("p", 1, _request()):
                pass
    assert caught.value.retry_after_s
    assert caught.value.status == 503


async def test_waiting_longer_than_max_wait_is_refused_and_leaves_no_trace() -> None:
    queue = OnlineQueue(max_waiting=5, max_wait_s=0.01)
    async with queue.slot("p", 1, _request()):
        with pytest.raises(Overloaded):
            async with queue.slot("p", 1, _request()):
                pass
    assert queue.num_waiting == 0
    assert queue.in_flight("p") == 0


async def test_the_most_urgent_class_goes_first_then_the_first_come() -> None:
    queue = OnlineQueue(max_waiting=10, max_wait_s=5)
    served: list[str] = []

    async def one(name: str, klass: str) -> None:
        async with queue.slot("p", 1, _request(klass)):
            served.append(name)

    async with anyio.create_task_group() as tasks, queue.slot("p", 1, _request()):
        for name, klass in [("b1", "batch"), ("s1", "standard"), ("i1", "interactive")]:
            tasks.start_soon(one, name, klass)
            await anyio.wait_all_tasks_blocked()
        tasks.start_soon(one, "s2", "standard")
        await anyio.wait_all_tasks_blocked()
    assert served == ["i1", "s1", "s2", "b1"]


async def test_a_waiter_that_is_cancelled_frees_its_turn() -> None:
    queue = OnlineQueue(max_waiting=10, max_wait_s=5)
    served: list[str] = []

    async def one(name: str) -> None:
        async with queue.slot("p", 1, _request()):
            served.append(name)

    async with anyio.create_task_group() as tasks, queue.slot("p", 1, _request()):
        async with anyio.create_task_group() as leaving:
            leaving.start_soon(one, "gone")
            await anyio.wait_all_tasks_blocked()
            leaving.cancel_scope.cancel()
        tasks.start_soon(one, "stays")
        await anyio.wait_all_tasks_blocked()
    assert served == ["stays"]
    assert queue.num_waiting == 0
    assert queue.in_flight("p") == 0
