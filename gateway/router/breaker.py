"""Circuit breaker of one target: so many failures in a row close the route for a while, then one probe may pass."""

from __future__ import annotations

from collections.abc import Callable

from plugins.interfaces import Breaker


class CircuitBreaker:
    """Closed -> open after `failures` in a row -> half-open after `open_s`: one request probes, the others wait."""

    def __init__(self, settings: Breaker, clock: Callable[[], float]) -> None:
        self._settings = settings
        self._clock = clock
        self._failures_in_row = 0
        self._open_until_s = 0.0
        self._probe_until_s = 0.0

    def allows(self) -> bool:
        """Whether a request may go to the target now. In the half-open state this takes the one probe."""
        if not self._settings.failures or self._failures_in_row < self._settings.failures:
            return True
        now = self._clock()
        if now < self._open_until_s or now < self._probe_until_s:
            return False
        # A probe whose outcome is never told (the client left) blocks others no longer than one period.
        self._probe_until_s = now + self._settings.open_s
        return True

    def retry_after_s(self) -> float:
        return max(0.0, max(self._open_until_s, self._probe_until_s) - self._clock())

    def succeeded(self) -> None:
        self._failures_in_row = 0
        self._probe_until_s = 0.0

    def failed(self) -> None:
        self._failures_in_row += 1
        self._probe_until_s = 0.0
        if self._failures_in_row >= self._settings.failures:
            self._open_until_s = self._clock() + self._settings.open_s
