"""The one thread that steps the engine. Others hand it work through a queue; what it makes goes out by callbacks."""

from __future__ import annotations

import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Protocol

from backend.engine.params import EngineStats, GenerationRequest, InvalidGeneration, StepOutput

STATS_INTERVAL_S = 1.0
AddDone = Callable[[InvalidGeneration | None], None]


class Engine(Protocol):
    """What the thread needs of `backend.engine.engine.LLMEngine`."""

    max_model_len: int
    vocab_size: int

    @property
    def has_work(self) -> bool: ...

    def add(self, request: GenerationRequest) -> None: ...

    def abort(self, request_id: str) -> None: ...

    def step(self) -> list[StepOutput]: ...

    def stats(self) -> EngineStats: ...


class EngineListener(Protocol):
    """Called on the engine's thread, in the order in which things happened."""

    def on_step(self, outputs: list[StepOutput]) -> None: ...

    def on_stats(self, stats: EngineStats) -> None: ...

    def on_death(self, cause: BaseException) -> None:
        """`step` raised: no state of the engine can be trusted any more."""
        ...


class EngineThread:
    """Runs `engine.step()` while there is work and sleeps on the queue when there is none."""

    def __init__(
        self,
        engine: Engine,
        listener: EngineListener,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._listener = listener
        self._clock = clock
        self._commands: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._stats_due_s = 0.0
        self._thread = Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ask the thread to end after the step it is in."""
        self._commands.put(None)

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def add(self, rows: list[GenerationRequest], done: AddDone) -> None:
        """All rows or none. `done` hears None, or the refusal, on the engine's thread before the rows' first step."""
        self._commands.put(lambda: self._add(rows, done))

    def abort(self, row_ids: list[str]) -> None:
        """Takes effect before the next step; rows that have ended meanwhile are skipped."""
        self._commands.put(lambda: self._abort(row_ids))

    def _run(self) -> None:
        try:
            while self._apply_commands():
                if self._engine.has_work:
                    self._listener.on_step(self._engine.step())
                self._report()
        except BaseException as exc:
            self._listener.on_death(exc)

    def _apply_commands(self) -> bool:
        """Everything that waits in the queue; when the engine is idle, wait for something. False: stop."""
        block = not self._engine.has_work
        while True:
            try:
                command = self._commands.get(block=block)
            except Empty:
                return True
            if command is None:
                return False
            command()
            block = False

    def _add(self, rows: list[GenerationRequest], done: AddDone) -> None:
        for i, row in enumerate(rows):
            try:
                self._engine.add(row)
            except InvalidGeneration as exc:
                self._abort([row.request_id for row in rows[:i]])
                done(exc)
                return
        done(None)

    def _abort(self, row_ids: list[str]) -> None:
        for row_id in row_ids:
            self._engine.abort(row_id)

    def _report(self) -> None:
        """When the engine has just gone idle, and now and then while it works."""
        now_s = self._clock()
        if now_s >= self._stats_due_s or not self._engine.has_work:
            self._listener.on_stats(self._engine.stats())
            self._stats_due_s = now_s + STATS_INTERVAL_S
