"""Speculative decoding: guess tokens cheaply, check all guesses in one step of the model (Leviathan et al., 2023).

A guess is right when it is the token that the model's own logits lead to, so the text is that of decoding without
guesses: for a greedy or seeded request token by token, for any other in law (see `sampler.py`). What is guessed, how
many and when therefore never shows in the text, and the number may follow measured times.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from backend.engine.ngram import TokenHistory
from backend.engine.request import EngineRequest, Rows

MAX_DRAFTS = 10
logger = logging.getLogger(__name__)


class Drafter(Protocol):
    """Guesses. May be wrong, and may fail: a step then goes without."""

    def plan(self, request: EngineRequest, limit: int) -> int:
        """How many guesses, at most `limit`, this request will have -> 0: none this time."""
        ...

    def propose(self, requests: Sequence[EngineRequest]) -> None:
        """Make `drafts.token_ids` of each at most `drafts.num_granted` long; its blocks have room for them."""
        ...

    def forget(self, request: EngineRequest) -> None:
        """The request has ended."""
        ...


class NgramDrafter:
    """What a grammar leaves no choice about, else what followed before."""

    def __init__(self) -> None:
        self._histories: dict[str, TokenHistory] = {}

    def plan(self, request: EngineRequest, limit: int) -> int:
        history = self._histories.get(request.request_id)
        if history is None:
            history = self._histories[request.request_id] = TokenHistory()
        grammar = request.grammar
        guesses = grammar.forced()[:limit] if grammar is not None else []
        guesses = guesses or history.continuation(request.token_ids, limit)
        if grammar is not None:
            del guesses[grammar.num_legal(guesses) :]
        request.drafts.token_ids = guesses
        return len(guesses)

    def propose(self, requests: Sequence[EngineRequest]) -> None:
        """They have theirs since `plan`."""

    def forget(self, request: EngineRequest) -> None:
        self._histories.pop(request.request_id, None)


class Speculator:
    """Decides how many guesses each request gets, and counts how they fare."""

    def __init__(self, drafter: Drafter, clock: Callable[[], float], max_position: int) -> None:
        self.num_proposed = 0
        self.num_accepted = 0
        self._drafter = drafter
        self._clock = clock
        self._max_position = max_position
        self._cost = StepCost()

    def plan(self, running: Sequence[EngineRequest]) -> None:
        """Set `drafts.num_wanted` of every running request."""
        for request in running:
            request.drafts.clear()
        decoding = [request for request in running if request.num_wanted_tokens == 1]
        seconds = self._cost.with_guesses(len(decoding)) if decoding else []
        if not self._cost.has_seen(len(decoding)):
            seconds = seconds[:1]  # what guesses save must be known before what they cost
        for request in decoding:
            limit = min(
                guesses_worth(request.drafts.acceptance, seconds),
                request.max_output_tokens - request.num_output_tokens - 1,
                self._max_position - request.num_tokens,
            )
            if limit > 0:
                request.drafts.num_wanted = self._drafter.plan(request, limit)
            else:
                request.drafts.fade()

    def propose(self, requests: Sequence[EngineRequest]) -> None:
        """Fill in the guesses that the scheduler granted. A fault of the drafter costs the guesses, nothing else."""
        if not requests:
            return
        started_s = self._clock()
        try:
            self._drafter.propose(requests)
        except Exception:
            logger.exception("no guesses in this step: the drafter failed")
            for request in requests:
                request.drafts.clear()
        num_guesses = sum(len(request.drafts.token_ids) for request in requests)
        self._cost.add_guesses(num_guesses, self._clock() - started_s)

    def record_step(self, rows: Sequence[Rows], seconds: float) -> None:
        """Steps with prefill rows say nothing about the price of a guess: those need no logits."""
        num_rows = sum(len(item.token_ids) for item in rows)
        if num_rows == sum(item.num_logits for item in rows):
            self._cost.add_step(num_rows, seconds)

    def record(self, request: EngineRequest, output_ids: Sequence[int]) -> None:
        """`output_ids` is what the model made of the request's guesses."""
        drafts = request.drafts
        num_tested = min(len(output_ids), len(drafts.token_ids))
        num_accepted = sum(a == b for a, b in zip(output_ids, drafts.token_ids, strict=False))
        self.num_proposed += len(drafts.token_ids)
        self.num_accepted += num_accepted
        drafts.record(num_tested, num_accepted)
        drafts.clear()

    def forget(self, request: EngineRequest) -> None:
        self._drafter.forget(request)


def guesses_worth(acceptance: float, seconds: Sequence[float]) -> int:
    """How many guesses bring the most tokens a second: `seconds[k]` is what a step with k guesses takes.

    Guess k helps only when all before it are right too, so it brings acceptance ** k tokens.
    """
    best, best_speed, tokens = 0, 1.0 / seconds[0], 1.0
    for k in range(1, len(seconds)):
        tokens += acceptance**k
        if tokens / seconds[k] > best_speed:
            best, best_speed = k, tokens / seconds[k]
    return best


class StepCost:
    """What a step of n rows takes, as measured of late; between and beyond measured numbers it is a straight line.

    No formula: on a CPU kernels take rows in groups, so the cost goes up in stairs. The estimate follows faster steps
    quickly and slower ones slowly: other programs only ever make a step slower.
    """

    PRIOR_SLOPE = 0.2  # a row more, in terms of what a step takes without any
    MAX_ROWS = 256

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}  # by rows
        self._fewest_rows = self.MAX_ROWS + 1  # of a step so far
        self._seconds_per_guess = 0.0

    def has_seen(self, num_rows: int) -> bool:
        """Whether a step of so many rows, or fewer, was measured."""
        return self._fewest_rows <= num_rows

    def add_step(self, num_rows: int, seconds: float) -> None:
        self._fewest_rows = min(self._fewest_rows, num_rows)
        if num_rows <= self.MAX_ROWS and seconds > 0.0:
            known = self._seconds.get(num_rows, seconds)
            self._seconds[num_rows] = known + (0.3 if seconds < known else 0.03) * (seconds - known)

    def add_guesses(self, num_guesses: int, seconds: float) -> None:
        if num_guesses:
            self._seconds_per_guess += 0.1 * (seconds / num_guesses - self._seconds_per_guess)

    def with_guesses(self, num_requests: int) -> list[float]:
        """Seconds of a step in which each of `num_requests` has 0, 1, .. MAX_DRAFTS guesses."""
        return [
            self._of(num_requests * (1 + k)) + num_requests * k * self._seconds_per_guess
            for k in range(MAX_DRAFTS + 1)
        ]

    def _of(self, num_rows: int) -> float:
        if (known := self._seconds.get(num_rows)) is not None:
            return known
        below = max((n for n in self._seconds if n < num_rows), default=None)
        above = min((n for n in self._seconds if n > num_rows), default=None)
        if below is not None and above is not None:
            share = (num_rows - below) / (above - below)
            return (1 - share) * self._seconds[below] + share * self._seconds[above]
        if below is not None and (least := min(self._seconds)) < below:  # on in a straight line
            slope = (self._seconds[below] - self._seconds[least]) / (below - least)
            return self._seconds[below] + max(0.0, slope) * (num_rows - below)
        nearest = below or above
        if nearest is None:
            return 1.0 + self.PRIOR_SLOPE * num_rows
        ratio = (1.0 + self.PRIOR_SLOPE * num_rows) / (1.0 + self.PRIOR_SLOPE * nearest)
        return self._seconds[nearest] * ratio
