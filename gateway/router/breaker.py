"""Circuit breaker of one target: so many failures in a row close the route for a while, then one probe may pass."""

from __future__ import annotations

import logging
from collections.abc import Callable

from plugins.interfaces import Breaker

log = logging.getLogger("tidegate")


class CircuitBreaker:
    """Closed -> open after `failures` in a row -> half-open after `open_s`: one request probes, the others wait."""

    def __init__(self, target: str, settings: Breaker, clock: Callable[[], float]) -> None:
        self._target = target
        self._settings = settings
        self._clock = clock
        self._failures_in_row = 0
        self._open_until_s = 0.0
        self._probe_until_s = 0.0

    def allows(self) -> bool:
        """Whether a request may go to the target now. In the half-open state this takes the one probe."""
        if not self.is_open:
            return True
        now = self._clock()
        if now < self._open_until_s or now < self._probe_until_s:
            return False
        # A probe whose outcome is never told (the client left) blocks others no longer than one period.
        self._probe_until_s = now + self._settings.open_s
        return True

    def retry_after_s(self) -> float:
        return max(0.0, max(self._open_until_s, self._probe_until_s) - self._clock())

    @property
    def is_open(self) -> bool:
        failures = self._settings.failures
        return bool(failures) and self._failures_in_row >= failures

    def succeeded(self) -> None:
        if self.is_open:
            log.warning("target %s answers again", self._target)
        self._failures_in_row = 0
        self._probe_until_s = 0.0

    def failed(self) -> None:
        self._failures_in_row += 1
        self._probe_until_s = 0.0
        if self.is_open:
            self._open_until_s = self._clock() + self._settings.open_s
        if self._failures_in_row == self._settings.failures:
            log.warning(
                "target %s failed %d times in a row; it is passed over for %g s at a time",
                self._target,
                self._failures_in_row,
                self._settings.open_s,
            )
