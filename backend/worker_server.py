"""Which engine row belongs to whom: requests of all gateway processes in, what the engine makes of them out.

Everything here runs on the event loop's thread; what the engine's thread reports is handed over in order.
"""

from __future__ import annotations

import asyncio
import os
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from backend.engine.params import EngineStats, InvalidGeneration, StepOutput
from backend.engine_thread import Engine, EngineThread
from backend.logprobs import LogprobGate
from backend.prompts import Prompt, PromptReader, Refused, make_rows
from backend.protocol import Accepted, Delta, Deltas, Generate, Ready, Stats
from backend.worker_session import Choice, LiveRequest, Session


class WorkerServer:
    """The worker's middle. An `EngineListener`: its `on_` methods are called on the engine's thread."""

    def __init__(self, engine: Engine, reader: PromptReader, ready: Ready) -> None:
        self.reader = reader
        self.ready = ready
        self.engine_thread = EngineThread(engine, self)
        # One at a time: a crowd of long prompts must not take the engine's processors.
        self.long_prompts = ThreadPoolExecutor(1, "long-prompts")
        self._loop = asyncio.get_running_loop()
        self._sessions: set[Session] = set()
        self._choices: dict[str, Choice] = {}
        self._num_sessions = 0
        self._stats = _stats_message(engine.stats())

    def new_session(self) -> Session:
        self._num_sessions += 1
        return Session(self, self._num_sessions)

    def close(self) -> None:
        for session in list(self._sessions):
            session.close()
        self.engine_thread.stop()
        self.long_prompts.shutdown(wait=False, cancel_futures=True)

    # -- from the engine's thread ------------------------------------------------------------------------------------

    def on_step(self, outputs: list[StepOutput]) -> None:
        if outputs:
            self.hand_over(self._send_outputs, outputs)

    def on_stats(self, stats: EngineStats) -> None:
        self.hand_over(self._send_stats, stats)

    def on_death(self, cause: BaseException) -> None:
        traceback.print_exception(cause)
        os._exit(1)  # the supervisor starts a fresh engine; this one's memory cannot be trusted

    def hand_over(self, callback: Callable[..., None], *args: object) -> None:
        self._loop.call_soon_threadsafe(callback, *args)

    # -- on the loop -------------------------------------------------------------------------------------------------

    def greet(self, session: Session) -> None:
        self._sessions.add(session)
        session.send(self.ready)
        session.send(self._stats)

    def leave(self, session: Session, live: list[LiveRequest]) -> None:
        self._sessions.discard(session)
        for request in live:
            self.abort(request)

    def admit(self, request: LiveRequest, prompts: list[Prompt], row_prefix: str) -> None:
        """Hand the rows to the engine. Their choices are known before the first step can report them."""
        message, rows = request.message, make_rows(request.message, prompts, row_prefix)
        for index, row in enumerate(rows):
            gate = self._new_gate(message, prompts[index // message.n])
            request.choices[row.request_id] = Choice(request, index, gate)
        self._choices |= request.choices
        self.engine_thread.add(
            rows, lambda refusal: self.hand_over(self._added, request, prompts, refusal)
        )

    def abort(self, request: LiveRequest) -> None:
        for row_id in request.choices:
            del self._choices[row_id]
        if request.choices:
            self.engine_thread.abort(list(request.choices))
            request.choices.clear()

    def _new_gate(self, message: Generate, prompt: Prompt) -> LogprobGate | None:
        if message.params.logprobs is None:
            return None
        start = len(prompt.text) if message.echo else 0
        return LogprobGate(self.reader.tokenizer, offset=start, num_shown=start)

    def _added(
        self, request: LiveRequest, prompts: list[Prompt], refusal: InvalidGeneration | None
    ) -> None:
        session, message = request.session, request.message
        if not session.owns(request):
            return  # aborted meanwhile
        if refusal is not None:
            for row_id in request.choices:
                del self._choices[row_id]
            request.choices.clear()
            session.reject(request, Refused(refusal.message, refusal.param, refusal.code))
            return
        num_tokens = sum(len(p.token_ids) for p in prompts)
        session.send(Accepted(message.request_id, num_tokens, prompts[0].in_reasoning))
        if message.echo:
            session.send(Deltas(_echo(message, prompts)))

    def _send_outputs(self, outputs: list[StepOutput]) -> None:
        """One frame for each gateway process, however many of its streams moved."""
        frames: dict[Session, list[Delta]] = {}
        for output in outputs:
            choice = self._choices.get(output.request_id)
            if choice is None:
                continue  # aborted while the step ran
            delta = _delta(choice, output)
            if delta.text or delta.logprobs or delta.finish_reason is not None:
                frames.setdefault(choice.request.session, []).append(delta)
            if output.finish_reason is not None:
                self._forget(choice, output.request_id)
        for session, deltas in frames.items():
            session.send(Deltas(deltas))

    def _forget(self, choice: Choice, row_id: str) -> None:
        del self._choices[row_id]
        del choice.request.choices[row_id]
        if not choice.request.choices:
            choice.request.session.ended(choice.request)

    def _send_stats(self, stats: EngineStats) -> None:
        self._stats = _stats_message(stats)
        for session in list(self._sessions):
            session.send(self._stats)


def _delta(choice: Choice, output: StepOutput) -> Delta:
    return Delta(
        choice.request.message.request_id,
        choice.index,
        output.text,
        output.num_output_tokens,
        output.num_cached_tokens,
        choice.gate.pass_through(output) if choice.gate is not None else [],
        output.finish_reason,
        output.stop_reason,
        output.error,
    )


def _echo(message: Generate, prompts: list[Prompt]) -> list[Delta]:
    return [
        Delta(message.request_id, i * message.n + k, prompt.text, 0, 0)
        for i, prompt in enumerate(prompts)
        for k in range(message.n)
    ]


def _stats_message(stats: EngineStats) -> Stats:
    return Stats(
        num_running=stats.num_running,
        num_waiting=stats.num_waiting,
        num_blocks=stats.num_blocks,
        num_free_blocks=stats.num_free_blocks,
        num_preemptions=stats.num_preemptions,
        num_cached_tokens=stats.num_cached_tokens,
        num_prompt_tokens=stats.num_prompt_tokens,
        num_output_tokens=stats.num_output_tokens,
    )
