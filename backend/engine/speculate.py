"""Speculative decoding: guess tokens cheaply, check all guesses in one step of the model (Leviathan et al., 2023).

A guess is right when it is the token that the model's own logits lead to, so the text is that of decoding without
guesses: for a greedy or seeded request token by token, for any other in law (see `sampler.py`). What is guessed, how
many and when therefore never shows in the text, and the number may follow measured times.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Protocol

from backend.engine.ngram import TokenHistory
from backend.engine.request import EngineRequest

MAX_DRAFTS = 10
_MIN_GAIN = 0.02  # a guess less likely than this never pays, however cheap its row looks
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
    def __init__(self) -> None:
        self._histories: dict[str, TokenHistory] = {}

    def plan(self, request: EngineRequest, limit: int) -> int:
        history = self._histories.get(request.request_id)
        if history is None:
            history = self._histories[request.request_id] = TokenHistory()
        request.drafts.token_ids = history.continuation(request.token_ids, limit)
        return len(request.drafts.token_ids)

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
        price = self._cost.guess_price(len(decoding))
        for request in decoding:
            limit = min(
                guesses_worth(request.drafts.acceptance, price),
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

    def record_step(self, num_rows: int, seconds: float) -> None:
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


def guesses_worth(acceptance: float, price: float) -> int:
    """How many guesses pay, when each is right with `acceptance` and costs `price` tokens' worth of time.

    Guess k helps only when all before it are right too, so it brings acceptance ** k tokens.
    """
    price = max(price, _MIN_GAIN)
    if price >= 1.0 or acceptance <= price:
        return 0
    if acceptance >= 1.0:
        return MAX_DRAFTS
    return min(MAX_DRAFTS, int(math.log(price) / math.log(acceptance)))


class StepCost:
    """A step of n rows takes a + b * n seconds: a and b from the latest steps, by least squares."""

    PRIOR_SLOPE = 0.1  # b / a while too little is known
    MAX_ROWS = 64  # longer steps are prefill: they say nothing about the price of a row more
    _DECAY = 0.98

    def __init__(self) -> None:
        self._weight = self._rows = self._rows2 = self._seconds = self._product = 0.0
        self._seconds_per_guess = 0.0

    def add_step(self, num_rows: int, seconds: float) -> None:
        if num_rows > self.MAX_ROWS:
            return
        if self._weight > 8:  # a step that other programs held up
            seconds = min(seconds, 3 * self._seconds / self._weight)
        keep = self._DECAY
        self._weight = keep * self._weight + 1.0
        self._rows = keep * self._rows + num_rows
        self._rows2 = keep * self._rows2 + num_rows * num_rows
        self._seconds = keep * self._seconds + seconds
        self._product = keep * self._product + num_rows * seconds

    def add_guesses(self, num_guesses: int, seconds: float) -> None:
        if num_guesses:
            self._seconds_per_guess += 0.1 * (seconds / num_guesses - self._seconds_per_guess)

    def guess_price(self, num_requests: int) -> float:
        """What a guess costs, in tokens that its time would bring when `num_requests` decode without guesses."""
        slope, step = self._fit(num_requests)
        return num_requests * (slope + self._seconds_per_guess) / step

    def _fit(self, num_rows: int) -> tuple[float, float]:
        """Seconds for one row more, and for a step of `num_rows`; without measurements in other units."""
        if self._weight > 8 and self._seconds > 0.0:
            rows, seconds = self._rows / self._weight, self._seconds / self._weight
            variance = self._rows2 / self._weight - rows * rows
            covariance = self._product / self._weight - rows * seconds
            if variance > 0.25 and covariance > 0.0:
                slope = covariance / variance
                step = seconds + slope * (num_rows - rows)
                if step > slope * num_rows:
                    return slope, step
            return seconds * self.PRIOR_SLOPE, seconds
        return self.PRIOR_SLOPE, 1.0 + self.PRIOR_SLOPE * num_rows
