"""Which engine row belongs to whom: requests of all gateway processes in, what the engine makes of them out.

Everything here runs on the event loop's thread; what the engine's thread reports is handed over in order.
"""

from __future__ import annotations

import asyncio
import os
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from backend.best_of import BestOf
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
        rows = make_rows(request.message, prompts, row_prefix)
        per_prompt = request.message.rows_per_prompt
        rankings = [_ranking(request.message, i) for i in range(len(prompts))]
        for index, row in enumerate(rows):
            i = index // per_prompt
            echo = prompts[i].text if request.message.echo else None
            gate = self._new_gate(request.message, echo)
            request.choices[row.request_id] = Choice(request, index, gate, echo or "", rankings[i])
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

    def _new_gate(self, message: Generate, echo: str | None) -> LogprobGate | None:
        if message.params.logprobs is None:
            return None
        return LogprobGate(self.reader.tokenizer, echo)

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

    def _send_outputs(self, outputs: list[StepOutput]) -> None:
        """One frame for each gateway process, however many of its streams moved."""
        frames: dict[Session, list[Delta]] = {}
        for output in outputs:
            choice = self._choices.get(output.request_id)
            if choice is None:
                continue  # aborted while the step ran
            deltas = [_delta(choice, output)]
            if choice.ranking is not None:
                deltas = choice.ranking.pass_through(deltas[0], output.mean_logprob)
            for delta in deltas:
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


def _ranking(message: Generate, prompt_index: int) -> BestOf | None:
    if message.rows_per_prompt == message.n:
        return None
    show_logprobs = message.params.logprobs is not None
    return BestOf(message.best_of, message.n, prompt_index * message.n, show_logprobs)


def _delta(choice: Choice, output: StepOutput) -> Delta:
    echo, choice.echo = choice.echo, ""
    return Delta(
        choice.request.message.request_id,
        choice.index,
        echo + output.text,
        output.num_output_tokens,
        output.num_cached_tokens,
        choice.gate.pass_through(output) if choice.gate is not None else [],
        output.finish_reason,
        output.stop_reason,
        output.error,
        output.num_draft_tokens,
        output.num_accepted_tokens,
        output.embedding,
    )


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
        num_draft_tokens=stats.num_draft_tokens,
        num_accepted_tokens=stats.num_accepted_tokens,
        num_evictions=stats.num_evictions,
        running_by_class=stats.running_by_class,
        waiting_by_class=stats.waiting_by_class,
    )
