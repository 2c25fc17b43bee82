from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import aclosing

import pytest

from gateway.queues.online import OnlineQueue
from gateway.router.dispatch import Dispatcher
from gateway.router.routes import Routes
from plugins.errors import (
    GatewayError,
    InvalidRequest,
    Overloaded,
    UpstreamError,
    UpstreamTimeout,
    UpstreamUnavailable,
)
from plugins.events import Event, Failed, Request, Started, TextDelta
from plugins.interfaces import Breaker, Objective, Principal, ProviderSettings
from plugins.testing import ScriptedProvider, VirtualClock, answer

pytestmark = pytest.mark.anyio
STARTED = Started("chatcmpl-1", "scripted", 1)


class Meter:
    """Only what the dispatcher tells it."""

    def __init__(self) -> None:
        self.targets: list[str] = []

    def target_chosen(self, target: str) -> None:
        self.targets.append(target)


class Scene:
    """Some providers behind one model, and what came of a request."""

    def __init__(self, *providers: ScriptedProvider, retries: int = 0, failures: int = 5) -> None:
        self.clock = VirtualClock()
        self.meter = Meter()
        self.providers = providers
        table = {
            p.name: (
                ProviderSettings(
                    p.name, "scripted", max_retries=retries, breaker=Breaker(failures, 10)
                ),
                p,
            )
            for p in providers
        }
        routes = Routes(table, self.clock)
        routes.load(
            [("m", tuple(f"{p.name}/up" for p in providers), "ordered", Objective(400, 50))]
        )
        self.route = routes.find("m", Principal("k"))
        self.queue = OnlineQueue(10, 1)
        self.dispatcher = Dispatcher(self.queue, self.clock.sleep, random.Random(0))

    async def run(self, take: int | None = None, verbatim: bool = False) -> list[Event]:
        request = Request(id="r", dialect="chat", model="m")
        out: list[Event] = []
        stream = self.dispatcher.stream(
            request,
            self.route,
            self.meter,
            tenant="k",
            verbatim=verbatim,  # type: ignore[arg-type]
        )
        async with aclosing(stream) as events:
            async for batch in events:
                out += batch
                if take is not None and len(out) >= take:
                    break
        return out

    def counts(self) -> list[int]:
        return [len(p.calls) for p in self.providers]


def _two(error: Exception) -> tuple[ScriptedProvider, ScriptedProvider]:
    return ScriptedProvider("one", [error]), ScriptedProvider("two", [answer("from two")])


def _text(events: Sequence[Event]) -> str:
    return "".join(e.text for e in events if isinstance(e, TextDelta))


@pytest.mark.parametrize("status", [401, 403, 404, 408, 429, 500, 502, 503, 529])
async def test_a_failure_of_one_target_goes_on_to_the_next(status: int) -> None:
    scene = Scene(*_two(UpstreamError("no", status=status)))
    assert _text(await scene.run()) == "from two"
    assert scene.counts() == [1, 1]
    assert scene.meter.targets == ["one/up", "two/up"]


async def test_the_objective_of_the_model_goes_with_the_call() -> None:
    scene = Scene(ScriptedProvider("one", [answer("hi")]))
    await scene.run()
    ((_, call),) = scene.providers[0].calls
    assert call.objective == Objective(400, 50)


@pytest.mark.parametrize("status", [400, 413, 422])
async def test_the_clients_own_fault_is_tried_nowhere_else(status: int) -> None:
    scene = Scene(*_two(UpstreamError("bad field", status=status)), retries=3)
    with pytest.raises(UpstreamError, match="bad field"):
        await scene.run()
    assert scene.counts() == [1, 0]


async def test_an_invalid_request_ends_at_once() -> None:
    scene = Scene(*_two(InvalidRequest("too long")))
    with pytest.raises(InvalidRequest):
        await scene.run()
    assert scene.counts() == [1, 0]


async def test_an_answer_that_never_comes_to_content_is_not_held_without_end() -> None:
    scene = Scene(
        ScriptedProvider("one", [[STARTED]] * 5000), ScriptedProvider("two", [answer("x")])
    )
    assert _text(await scene.run()) == "x"
    assert scene.counts() == [1, 1]


async def test_n_retries_are_n_plus_one_tries() -> None:
    scene = Scene(ScriptedProvider("one", [UpstreamError("boom", status=500)]), retries=2)
    with pytest.raises(UpstreamError):
        await scene.run()
    assert scene.counts() == [3]
    assert len(scene.clock.slept_s) == 2


async def test_a_short_retry_after_is_kept_and_a_long_one_goes_to_the_client() -> None:
    short = ScriptedProvider(
        "one", [UpstreamError("x", status=429, retry_after_s=3)], [answer("ok")]
    )
    scene = Scene(short, retries=1)
    assert _text(await scene.run()) == "ok"
    assert scene.clock.slept_s[0] >= 3
    long = Scene(
        ScriptedProvider("one", [UpstreamError("x", status=429, retry_after_s=17)]), retries=1
    )
    with pytest.raises(UpstreamError) as caught:
        await long.run()
    assert (caught.value.status, caught.value.retry_after_s) == (429, 17)
    assert long.counts() == [1]


async def test_a_silent_target_is_not_asked_twice() -> None:
    scene = Scene(*_two(UpstreamTimeout("silent")), retries=1)
    assert _text(await scene.run()) == "from two"
    assert scene.counts() == [1, 1]


async def test_an_error_after_the_role_but_before_content_still_falls_back() -> None:
    first = ScriptedProvider("one", [[STARTED], UpstreamError("overloaded", status=529)])
    scene = Scene(first, ScriptedProvider("two", [answer("from two")]))
    events = await scene.run()
    assert _text(events) == "from two"
    assert len([e for e in events if isinstance(e, Started)]) == 1


async def test_after_content_nothing_is_tried_again() -> None:
    first = ScriptedProvider("one", [[STARTED, TextDelta("Hel")], UpstreamUnavailable("cut")])
    scene = Scene(first, ScriptedProvider("two", [answer("Hello")]), retries=2)
    with pytest.raises(UpstreamUnavailable):
        await scene.run()
    assert scene.counts() == [1, 0]


async def test_an_answer_without_content_is_a_failure() -> None:
    scene = Scene(ScriptedProvider("one", [[STARTED]]), ScriptedProvider("two", [answer("x")]))
    assert _text(await scene.run()) == "x"


@pytest.mark.parametrize("status", [401, 403, 404])
async def test_our_own_refused_key_does_not_look_like_the_clients(status: int) -> None:
    scene = Scene(ScriptedProvider("one", [UpstreamError("bad key", status=status)]))
    with pytest.raises(UpstreamError) as caught:
        await scene.run()
    assert caught.value.status == 502


async def test_an_open_breaker_passes_the_target_over() -> None:
    scene = Scene(*_two(UpstreamError("down", status=503)), failures=2)
    for _ in range(4):
        assert _text(await scene.run()) == "from two"
    assert scene.counts() == [2, 4]


async def test_all_breakers_open_is_503_with_the_time_to_wait() -> None:
    scene = Scene(ScriptedProvider("one", [UpstreamError("down", status=503)]), failures=1)
    with pytest.raises(UpstreamError):
        await scene.run()
    with pytest.raises(Overloaded) as caught:
        await scene.run()
    assert caught.value.retry_after_s == pytest.approx(10)


async def test_a_client_fault_does_not_open_the_breaker() -> None:
    scene = Scene(ScriptedProvider("one", [UpstreamError("bad", status=400)]), failures=1)
    for _ in range(3):
        with pytest.raises(UpstreamError):
            await scene.run()
    assert scene.counts() == [3]


async def test_leaving_early_closes_the_upstream_and_frees_the_place() -> None:
    provider = ScriptedProvider("one", [[STARTED, TextDelta("a")], [TextDelta("b")]])
    scene = Scene(provider)
    await scene.run(take=1)
    assert provider.open_streams == 0
    assert scene.queue.in_flight("one") == 0


async def test_verbatim_is_asked_only_of_a_provider_of_the_same_dialect() -> None:
    same = ScriptedProvider("one", [answer("x")], dialects=frozenset({"chat"}))
    other = ScriptedProvider("two", [answer("x")])
    await Scene(same).run(verbatim=True)
    await Scene(other).run(verbatim=True)
    assert [same.calls[0][1].verbatim, other.calls[0][1].verbatim] == [True, False]


async def test_attempts_are_numbered_from_one() -> None:
    provider = ScriptedProvider("one", [UpstreamError("x", status=500)])
    with pytest.raises(GatewayError):
        await Scene(provider, retries=1).run()
    assert [call.attempt for _, call in provider.calls] == [1, 2]


async def test_a_provider_that_is_not_ready_is_passed_over_while_another_is() -> None:
    down, up = ScriptedProvider("one", [answer("one")]), ScriptedProvider("two", [answer("two")])
    scene = Scene(down, up)
    down.is_ready = False
    assert _text(await scene.run()) == "two"
    up.is_ready = False
    assert _text(await scene.run()) == "one"  # nobody is: the order holds, and its error is shown


async def test_failures_while_not_ready_do_not_open_the_breaker() -> None:
    provider = ScriptedProvider("one", [UpstreamUnavailable("starting", status=503)])
    provider.is_ready = False
    scene = Scene(provider, failures=1)
    for _ in range(2):
        with pytest.raises(UpstreamUnavailable):
            await scene.run()


async def test_a_failure_told_as_an_event_is_a_failure_like_any_other() -> None:
    early = ScriptedProvider("one", [[STARTED, Failed("overloaded", status=529)]])
    scene = Scene(early, ScriptedProvider("two", [answer("from two")]))
    assert _text(await scene.run()) == "from two"
    late = Scene(ScriptedProvider("one", [[STARTED, TextDelta("a")], [Failed("broke", code="x")]]))
    with pytest.raises(UpstreamError, match="broke") as caught:
        await late.run()
    assert caught.value.code == "x"


async def test_an_answer_that_never_finishes_is_a_failure_even_after_content() -> None:
    scene = Scene(ScriptedProvider("one", [[STARTED, TextDelta("a")]]))
    with pytest.raises(UpstreamUnavailable, match="too early"):
        await scene.run()
