"""Stops asking a store that does not answer."""

from __future__ import annotations


class Breaker:
    """Opens after `threshold` failures in a row; only a success closes it. Whoever opens it probes."""

    def __init__(self, threshold: int = 3) -> None:
        self._threshold = threshold
        self._failures_in_a_row = 0

    @property
    def is_open(self) -> bool:
        return self._failures_in_a_row >= self._threshold

    def record_success(self) -> None:
        self._failures_in_a_row = 0

    def record_failure(self) -> None:
        self._failures_in_a_row += 1
