import pytest

from gateway.router.breaker import CircuitBreaker
from plugins.interfaces import Breaker
from plugins.testing import VirtualClock


def _open_breaker(clock: VirtualClock) -> CircuitBreaker:
    breaker = CircuitBreaker("up/m", Breaker(failures=2, open_s=10), clock)
    breaker.failed()
    breaker.failed()
    return breaker


def test_failures_in_a_row_open_the_breaker() -> None:
    breaker = CircuitBreaker("up/m", Breaker(failures=2, open_s=10), VirtualClock())
    breaker.failed()
    assert breaker.allows()
    breaker.failed()
    assert not breaker.allows()


def test_a_success_between_failures_starts_the_count_anew() -> None:
    breaker = CircuitBreaker("up/m", Breaker(failures=2, open_s=10), VirtualClock())
    breaker.failed()
    breaker.succeeded()
    breaker.failed()
    assert breaker.allows()


def test_after_its_time_one_probe_passes_and_the_others_wait() -> None:
    clock = VirtualClock()
    breaker = _open_breaker(clock)
    clock.now_s += 10
    assert [breaker.allows(), breaker.allows()] == [True, False]


def test_a_good_probe_closes_it_and_a_bad_one_opens_it_again() -> None:
    clock = VirtualClock()
    good, bad = _open_breaker(clock), _open_breaker(clock)
    clock.now_s += 10
    assert good.allows()
    assert bad.allows()
    good.succeeded()
    bad.failed()
    assert good.allows()
    assert not bad.allows()
    assert bad.retry_after_s() == 10


def test_a_probe_whose_outcome_is_never_told_does_not_block_for_ever() -> None:
    clock = VirtualClock()
    breaker = _open_breaker(clock)
    clock.now_s += 10
    assert breaker.allows()
    clock.now_s += 10
    assert breaker.allows()


def test_zero_failures_means_never() -> None:
    breaker = CircuitBreaker("up/m", Breaker(failures=0), VirtualClock())
    for _ in range(100):
        breaker.failed()
    assert breaker.allows()


def test_opening_and_closing_are_told_once_each(caplog: pytest.LogCaptureFixture) -> None:
    clock = VirtualClock()
    breaker = _open_breaker(clock)
    breaker.failed()
    clock.now_s += 10
    assert breaker.allows()
    breaker.succeeded()
    breaker.succeeded()
    messages = [record.getMessage() for record in caplog.records]
    assert messages == [
        "target up/m failed 2 times in a row; it is passed over for 10 s at a time",
        "target up/m answers again",
    ]
