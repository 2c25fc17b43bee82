from __future__ import annotations

from queue import SimpleQueue
from typing import Any

import pytest

from backend.engine.params import EngineStats, GenerationRequest, SamplingParams, StepOutput
from backend.engine_thread import EngineThread
from tests.backend.toy_worker import ToyEngine


class Listener:
    """Everything that the thread says, in order."""

    def __init__(self) -> None:
        self.heard: SimpleQueue[Any] = SimpleQueue()

    def on_step(self, outputs: list[StepOutput]) -> None:
        self.heard.put(outputs)

    def on_stats(self, stats: EngineStats) -> None:
        self.heard.put(stats)

    def on_death(self, cause: BaseException) -> None:
        self.heard.put(cause)

    def next(self, kind: type) -> Any:
        while not isinstance(item := self.heard.get(timeout=30), kind):
            pass
        return item


def row(row_id: str, **params: Any) -> GenerationRequest:
    return GenerationRequest(row_id, [97], SamplingParams(**params))


def start(listener: Listener, **kwargs: Any) -> EngineThread:
    thread = EngineThread(ToyEngine(), listener, **kwargs)
    thread.start()
    return thread


def test_stats_come_when_the_engine_goes_idle() -> None:
    listener = Listener()
    thread = start(listener, clock=lambda: 0.0)
    listener.heard.put("start")
    for name in ("a", "b"):
        thread.add([row(name, max_tokens=1)], lambda refusal: None)
        assert listener.next(EngineStats).num_running == 0
    thread.stop()


def test_an_abort_is_applied_before_the_next_step() -> None:
    listener = Listener()
    thread = start(listener)
    thread.add([row("a"), row("b")], lambda refusal: None)
    listener.next(list)
    thread.abort(["a", "nobody"])
    thread.add([row("c")], listener.heard.put)
    while listener.heard.get(timeout=30) is not None:
        pass  # until the thread has taken the commands
    assert [output.request_id for output in listener.next(list)] == ["b", "c"]
    thread.stop()


def test_rows_are_added_all_or_none() -> None:
    listener, refusals = Listener(), SimpleQueue[Any]()
    thread = start(listener)
    thread.add([row("a"), row("b", temperature=9.0)], refusals.put)
    assert refusals.get(timeout=30).param == "temperature"
    assert listener.next(EngineStats).num_running == 0
    thread.stop()


def test_a_step_that_raises_is_told_and_ends_the_thread() -> None:
    listener = Listener()
    thread = start(listener)
    prompt = list(b"explode")
    thread.add([GenerationRequest("a", prompt, SamplingParams())], lambda refusal: None)
    assert str(listener.next(RuntimeError)) == "the engine is corrupt"


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
def test_a_stopped_thread_ends(busy: bool) -> None:
    listener = Listener()
    thread = start(listener)
    if busy:
        thread.add([row("a")], lambda refusal: None)
        listener.next(list)
    thread.stop()
    thread.join(30)
    assert not thread.is_alive()
