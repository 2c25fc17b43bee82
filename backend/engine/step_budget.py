"""The tokens of one step, handed out to one request after another."""

from __future__ import annotations

from backend.engine.request import EngineRequest

MAX_SCORED_ROWS = (
    256  # a step's rows of prompts whose logprobs are asked for: each makes a row of logits
)


class StepBudget:
    """What is left of one step."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.num_taken = 0
        self._num_scored_rows = MAX_SCORED_ROWS

    def narrow(self, num_tokens: int | None) -> None:
        """No more than so many from here on; None changes nothing."""
        if num_tokens is not None:
            self.num_tokens = min(self.num_tokens, num_tokens)

    def take(self, num_tokens: int) -> int:
        """At most so many -> how many there were."""
        num_tokens = min(num_tokens, self.num_tokens)
        self.num_tokens -= num_tokens
        self.num_taken += num_tokens
        return num_tokens

    def take_prefill(self, request: EngineRequest) -> int:
        """Tokens of this request's prefill that the step has room for."""
        if not request.num_unscored_tokens:
            return self.take(request.num_wanted_tokens)
        num_tokens = self.take(min(request.num_wanted_tokens, self._num_scored_rows))
        self._num_scored_rows -= num_tokens
        return num_tokens
