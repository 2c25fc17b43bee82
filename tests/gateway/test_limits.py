from __future__ import annotations

import pytest

from gateway.limits import LocalLimiter
from plugins.errors import QuotaExceeded, RateLimited
from plugins.events import Request, Sampling, Usage
from plugins.interfaces import Limits, Principal
from plugins.testing import VirtualClock

pytestmark = pytest.mark.anyio


def _request(max_tokens: int = 0) -> Request:
    return Request(id="r", dialect="chat", model="m", sampling=Sampling(max_tokens=max_tokens))


async def test_a_key_without_limits_is_never_refused() -> None:
    limiter = LocalLimiter(VirtualClock())
    for _ in range(1000):
        await limiter.reserve(Principal("free"), _request())


async def test_requests_per_minute_slide_and_say_when_to_come_back() -> None:
    clock = VirtualClock()
    limiter = LocalLimiter(clock)
    who = Principal("k", limits=Limits(rpm=2))
    for _ in range(2):
        (await limiter.reserve(who, _request())).settle(Usage())
    clock.now_s += 20
    with pytest.raises(RateLimited) as caught:
        await limiter.reserve(who, _request())
    assert caught.value.retry_after_s == pytest.approx(40)
    clock.now_s += 41
    await limiter.reserve(who, _request())


async def test_parallel_places_come_back_on_settle_and_refund_once_each() -> None:
    limiter = LocalLimiter(VirtualClock())
    who = Principal("k", limits=Limits(max_parallel=1))
    first = await limiter.reserve(who, _request())
    with pytest.raises(RateLimited):
        await limiter.reserve(who, _request())
    first.settle(Usage())
    first.refund()  # a second close must not free a second place
    second = await limiter.reserve(who, _request())
    with pytest.raises(RateLimited):
        await limiter.reserve(who, _request())
    second.refund()


async def test_a_refused_request_holds_nothing() -> None:
    """rpm 3, one at a time: A runs, B is refused, A ends, then C passes."""
    limiter = LocalLimiter(VirtualClock())
    who = Principal("k", limits=Limits(rpm=2, max_parallel=1))
    first = await limiter.reserve(who, _request())
    with pytest.raises(RateLimited):
        await limiter.reserve(who, _request())
    first.settle(Usage())
    await limiter.reserve(who, _request())


async def test_tokens_are_reserved_by_the_most_a_request_may_use() -> None:
    limiter = LocalLimiter(VirtualClock())
    who = Principal("k", limits=Limits(tpm=100))
    held = await limiter.reserve(who, _request(max_tokens=60))
    with pytest.raises(RateLimited) as caught:
        await limiter.reserve(who, _request(max_tokens=60))
    assert caught.value.type == "tokens"
    held.settle(Usage(prompt_tokens=5, completion_tokens=5))
    await limiter.reserve(who, _request(max_tokens=60))


async def test_the_total_quota_counts_what_was_really_used() -> None:
    limiter = LocalLimiter(VirtualClock())
    who = Principal("k", limits=Limits(max_tokens_total=100))
    (await limiter.reserve(who, _request(max_tokens=90))).settle(Usage(10, 20))
    (await limiter.reserve(who, _request(max_tokens=70))).settle(Usage(10, 60))
    with pytest.raises(QuotaExceeded) as caught:
        await limiter.reserve(who, _request(max_tokens=1))
    assert caught.value.code == "insufficient_quota"


async def test_the_prompt_counts_before_anybody_has_counted_its_tokens() -> None:
    limiter = LocalLimiter(VirtualClock())
    who = Principal("k", limits=Limits(tpm=100))
    request = Request(id="r", dialect="completions", model="m", prompts=[list(range(101))])
    with pytest.raises(RateLimited):
        await limiter.reserve(who, request)
