"""What one request carries for speculative decoding: the tokens guessed, and how its guesses have fared."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

_PRIOR_ACCEPTED, _PRIOR_TESTED = 1.5, 2.0
_DECAY = 0.9  # of what was seen, with each verified step
_FADE = 0.98  # with each step in which nothing is drafted, so that drafting is tried again


@dataclass(slots=True)
class Drafts:
    token_ids: list[int] = field(default_factory=list[int])  # guessed behind the last token
    # The probabilities [vocab_size] that each was drawn with; empty: each is the one guess there was, or drawn with
    # the noise of the token it stands for (see `sampler.py`).
    laws: list[np.ndarray] = field(default_factory=list[np.ndarray])
    num_wanted: int = 0  # before the step is scheduled
    num_granted: int = 0  # what the scheduler found room for
    num_proposed: int = 0  # since the request began
    num_accepted: int = 0
    # What the last token was drawn from [hidden_size], kept for a draft head; depends on the tokens alone, so it
    # outlives preemption.
    hidden: np.ndarray | None = None
    num_computed_tokens: int = 0  # by the draft model, if that is what guesses
    num_held_blocks: int = 0  # at the front, whose keys and values the draft model has
    _recently_accepted: float = 0.0
    _recently_tested: float = 0.0

    @property
    def acceptance(self) -> float:
        """How likely the next guess is right: what was seen of late, and some hope."""
        accepted = self._recently_accepted + _PRIOR_ACCEPTED
        return accepted / (self._recently_tested + _PRIOR_TESTED)

    def clear(self) -> None:
        """Forget what was guessed: it belonged to a step that is over, or never was."""
        self.token_ids, self.laws = [], []
        self.num_wanted = self.num_granted = 0

    def release(self) -> None:
        """The request gives up its blocks."""
        self.clear()
        self.num_computed_tokens = self.num_held_blocks = 0

    def record(self, num_tested: int, num_accepted: int) -> None:
        """`num_tested` guesses were looked at: all up to the first wrong one."""
        self.num_proposed += len(self.token_ids)
        self.num_accepted += num_accepted
        self._recently_tested = _DECAY * self._recently_tested + num_tested
        self._recently_accepted = _DECAY * self._recently_accepted + num_accepted

    def fade(self) -> None:
        self._recently_tested *= _FADE
        self._recently_accepted *= _FADE
