"""Limits of one gateway process: reserve before work, settle or refund on every way out.

This is the `on_limits_failure = "local"` counting, which needs no store. Windows slide over 60 s.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from gateway.accounting import estimate_prompt_tokens
from plugins.errors import QuotaExceeded, RateLimited
from plugins.events import Request, Usage
from plugins.interfaces import Limits, Principal

WINDOW_S = 60.0


class _Window:
    """A sum over the last minute, in which entries may still be corrected."""

    def __init__(self) -> None:
        self._entries: deque[list[float]] = deque()  # [time_s, amount]
        self._sum = 0.0

    def total(self, now_s: float) -> float:
        while self._entries and self._entries[0][0] <= now_s - WINDOW_S:
            self._sum -= self._entries.popleft()[1]
        return self._sum

    def add(self, now_s: float, amount: float) -> list[float]:
        entry = [now_s, amount]
        self._entries.append(entry)
        self._sum += amount
        return entry

    def correct(self, entry: list[float], amount: float, now_s: float) -> None:
        if entry[0] > now_s - WINDOW_S:
            self._sum += amount - entry[1]
        entry[1] = amount

    def wait_s(self, now_s: float) -> float:
        """Until the oldest entry leaves the window."""
        return max(0.0, self._entries[0][0] + WINDOW_S - now_s) if self._entries else 0.0


class _Account:
    """What one key has used and holds."""

    def __init__(self) -> None:
        self.requests = _Window()
        self.tokens = _Window()
        self.in_flight = 0
        self.tokens_total = 0  # used and reserved, since the start of this process


class LocalLease:
    """Closed exactly once; a second call does nothing."""

    __slots__ = ("_account", "_clock", "_entries", "_open", "_tokens")

    def __init__(self, account: _Account, tokens: int, clock: Callable[[], float]) -> None:
        now_s = clock()
        self._account = account
        self._clock = clock
        self._tokens = tokens
        self._entries = (account.requests.add(now_s, 1), account.tokens.add(now_s, tokens))
        self._open = True
        account.in_flight += 1
        account.tokens_total += tokens

    def settle(self, usage: Usage) -> None:
        self._close(usage.prompt_tokens + usage.completion_tokens, requests=1)

    def refund(self) -> None:
        self._close(0, requests=0)

    def _close(self, tokens: int, requests: int) -> None:
        if not self._open:
            return
        self._open = False
        now_s = self._clock()
        self._account.in_flight -= 1
        self._account.tokens_total += tokens - self._tokens
        self._account.requests.correct(self._entries[0], requests, now_s)
        self._account.tokens.correct(self._entries[1], tokens, now_s)


class _FreeLease:
    """For keys without limits: nothing is held."""

    def settle(self, usage: Usage) -> None:
        pass

    def refund(self) -> None:
        pass


FREE_LEASE = _FreeLease()
NO_LIMITS = Limits()


class LocalLimiter:
    """Counts in this process. Accounts are bounded by the keys of the config."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._accounts: dict[str, _Account] = {}

    async def reserve(self, principal: Principal, request: Request) -> LocalLease | _FreeLease:
        """Raises RateLimited (Retry-After: when the window frees) or QuotaExceeded; then nothing is held."""
        limits = principal.limits
        if limits == NO_LIMITS:
            return FREE_LEASE
        account = self._accounts.setdefault(principal.name, _Account())
        tokens = estimate_prompt_tokens(request) + (request.sampling.max_tokens or 0)
        self._check(limits, account, tokens)
        return LocalLease(account, tokens, self._clock)

    def _check(self, limits: Limits, account: _Account, tokens: int) -> None:
        now_s = self._clock()
        if limits.max_parallel is not None and account.in_flight >= limits.max_parallel:
            raise RateLimited(
                f"Rate limit reached: {limits.max_parallel} requests at once. Try again later.",
                retry_after_s=1.0,
            )
        if limits.rpm is not None and account.requests.total(now_s) + 1 > limits.rpm:
            raise RateLimited(
                f"Rate limit reached: {limits.rpm} requests per minute.",
                retry_after_s=account.requests.wait_s(now_s),
            )
        if limits.tpm is not None and account.tokens.total(now_s) + tokens > limits.tpm:
            raise RateLimited(
                f"Rate limit reached: {limits.tpm} tokens per minute; this request may need {tokens}.",
                type="tokens",
                retry_after_s=account.tokens.wait_s(now_s),
            )
        total = limits.max_tokens_total
        if total is not None and account.tokens_total + tokens > total:
            raise QuotaExceeded(
                f"The quota of this key is used up: {total} tokens in all; this request may need {tokens}."
            )
