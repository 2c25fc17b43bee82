from __future__ import annotations

import asyncio

import anyio
import pytest

from plugins.errors import (
    GatewayError,
    InvalidRequest,
    ModelNotFound,
    PluginFailed,
    RateLimited,
    UpstreamUnavailable,
)
from plugins.events import Event, Finished, Request, Started, TextDelta, Usage
from plugins.interfaces import (
    Context,
    Limits,
    Principal,
    RequestFilter,
)
from plugins.testing import ScriptedProvider, answer
from tests.gateway.pipeline_scene import Scene

pytestmark = pytest.mark.anyio


async def test_a_good_request_leaves_one_row_with_its_usage() -> None:
    scene = Scene(ScriptedProvider("one", [answer("hi")]))
    await scene.run()
    row = scene.row()
    assert (row.outcome, row.status, row.target) == ("ok", 200, "one/up")
    assert (row.usage.prompt_tokens, row.usage.completion_tokens) == (3, 2)


async def test_an_unknown_model_and_a_forbidden_one_look_the_same() -> None:
    scene = Scene(ScriptedProvider("one", [answer("hi")]))
    with pytest.raises(ModelNotFound) as forbidden:
        await scene.run(Principal("x", models=frozenset({"other"})))
    assert forbidden.value.code == "model_not_found"
    assert (scene.row().status, scene.row().outcome) == (404, "rejected")


async def test_a_failure_after_content_is_one_row_that_says_error() -> None:
    script = [[Started("c", "m", 1), TextDelta("a")], UpstreamUnavailable("cut")]
    scene = Scene(ScriptedProvider("one", script))
    with pytest.raises(UpstreamUnavailable):
        await scene.run()
    assert (scene.row().outcome, scene.row().status) == ("error", 502)
    assert scene.row().usage.estimated


async def test_a_client_that_leaves_is_one_row_that_says_cancelled() -> None:
    never = anyio.Event()
    provider = ScriptedProvider("one", [[Started("c", "m", 1), TextDelta("a")], never])
    scene = Scene(provider)
    with anyio.CancelScope() as scope:
        await scene.run(on_batch=scope.cancel)
    assert (scene.row().outcome, scene.row().status) == ("cancelled", 499)
    assert scene.row().usage.completion_tokens == 1
    assert provider.open_streams == 0


async def test_a_fault_of_ours_is_a_500_without_its_details() -> None:
    scene = Scene(ScriptedProvider("one", [RuntimeError("secret detail")]))
    with pytest.raises(GatewayError) as caught:
        await scene.run()
    assert caught.value.status == 500
    assert "secret" not in caught.value.message
    assert scene.row().error_code == "internal_error"


async def test_a_failed_request_gives_its_place_back() -> None:
    scene = Scene(ScriptedProvider("one", [UpstreamUnavailable("x")], [answer("ok")]))
    who = Principal("k", limits=Limits(max_parallel=1))
    with pytest.raises(UpstreamUnavailable):
        await scene.run(who)
    await scene.run(who)


async def test_over_the_limit_reaches_no_provider() -> None:
    provider = ScriptedProvider("one", [answer("ok")])
    scene = Scene(provider)
    who = Principal("k", limits=Limits(rpm=1))
    await scene.run(who)
    with pytest.raises(RateLimited):
        await scene.run(who)
    assert len(provider.calls) == 1
    assert [row.outcome for row in scene.ledger.rows] == ["ok", "rejected"]


class Refuse:
    async def apply(self, request: Request, context: Context) -> Request:
        raise InvalidRequest("forbidden word")


class Slow:
    async def apply(self, request: Request, context: Context) -> Request:
        await asyncio.Event().wait()
        return request


class Watch:
    read_only = True

    async def apply(self, request: Request, context: Context) -> Request:
        return request


async def test_a_filter_may_refuse_before_any_work() -> None:
    provider = ScriptedProvider("one", [answer("ok")])
    with pytest.raises(InvalidRequest, match="forbidden word"):
        await Scene(provider, filters=[Refuse()]).run()
    assert provider.calls == []


async def test_a_filter_that_is_late_fails_the_request_when_it_blocks() -> None:
    with pytest.raises(PluginFailed):
        await Scene(ScriptedProvider("one", [answer("ok")]), filters=[Slow()]).run()


class Change:
    """May change a request, though here it does not."""

    async def apply(self, request: Request, context: Context) -> Request:
        return request


@pytest.mark.parametrize(
    ("filters", "verbatim"), [([], True), ([Watch()], True), ([Watch(), Change()], False)]
)
async def test_bytes_are_forwarded_only_while_no_filter_may_change_them(
    filters: list[RequestFilter], verbatim: bool
) -> None:
    provider = ScriptedProvider("one", [answer("ok")], dialects=frozenset({"chat"}))
    await Scene(provider, filters=filters).run()
    assert provider.calls[0][1].verbatim is verbatim


class Hold:
    """Holds everything back until the end, then adds a mark."""

    def __init__(self) -> None:
        self.held: list[Event] = []

    def feed(self, events: list[Event]) -> list[Event]:
        self.held += [e for e in events if isinstance(e, TextDelta)]
        return [e for e in events if not isinstance(e, TextDelta)]

    def flush(self) -> list[Event]:
        return [*self.held, TextDelta("!")]


async def test_what_a_transform_holds_back_comes_before_the_end() -> None:
    scene = Scene(ScriptedProvider("one", [answer("hi")]), transforms=[lambda r, c: Hold()])
    events = await scene.run()
    assert [type(e) for e in events] == [Started, TextDelta, TextDelta, Finished, Usage]
    assert "".join(e.text for e in events if isinstance(e, TextDelta)) == "hi!"


async def test_transforms_run_in_order_over_what_the_ones_before_release() -> None:
    def twice(request: Request, context: Context) -> Hold:
        return Hold()

    scene = Scene(ScriptedProvider("one", [answer("hi")]), transforms=[twice, twice])
    text = [e.text for e in await scene.run() if isinstance(e, TextDelta)]
    assert "".join(text) == "hi!!"


class Forgetful:
    """Forgets every `return`."""

    async def apply(self, request: Request, context: Context) -> Request:
        return None  # type: ignore[return-value]

    def feed(self, events: list[Event]) -> list[Event]:
        return None  # type: ignore[return-value]

    def flush(self) -> list[Event]:
        return None  # type: ignore[return-value]


async def test_a_filter_that_returns_nothing_has_failed() -> None:
    with pytest.raises(PluginFailed):
        await Scene(ScriptedProvider("one", [answer("ok")]), filters=[Forgetful()]).run()


async def test_a_transform_that_returns_nothing_has_failed() -> None:
    forgetful = [lambda request, context: Forgetful()]
    with pytest.raises(PluginFailed):
        await Scene(ScriptedProvider("one", [answer("ok")]), transforms=forgetful).run()


async def test_a_transform_that_returns_nothing_is_passed_over_where_it_may_fail() -> None:
    forgetful = [lambda request, context: Forgetful()]
    scene = Scene(ScriptedProvider("one", [answer("ok")]), transforms=forgetful, on_error="allow")
    assert [type(e) for e in await scene.run()] == [Started, TextDelta, Finished, Usage]


class Raise:
    """Raises what it was made with, wherever it is asked."""

    def __init__(self, exc: BaseException) -> None:
        self.exc = exc

    async def apply(self, request: Request, context: Context) -> Request:
        raise self.exc

    def feed(self, events: list[Event]) -> list[Event]:
        raise self.exc

    def flush(self) -> list[Event]:
        return []


ODD_ENDS = [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError(), StopAsyncIteration()]


@pytest.mark.parametrize("exc", ODD_ENDS, ids=lambda exc: type(exc).__name__)
async def test_whatever_a_filter_raises_costs_its_request_alone(exc: BaseException) -> None:
    scene = Scene(ScriptedProvider("one", [answer("ok")]), filters=[Raise(exc)])
    with pytest.raises(PluginFailed):
        await scene.run()
    assert (scene.row().outcome, scene.row().status) == ("error", 500)


@pytest.mark.parametrize("exc", ODD_ENDS, ids=lambda exc: type(exc).__name__)
async def test_whatever_a_transform_raises_costs_its_request_alone(exc: BaseException) -> None:
    raising = [lambda request, context: Raise(exc)]
    scene = Scene(ScriptedProvider("one", [answer("ok")]), transforms=raising)
    with pytest.raises(PluginFailed):
        await scene.run()
    assert (scene.row().outcome, scene.row().status) == ("error", 500)


async def test_a_client_that_leaves_during_a_filter_is_one_row_that_says_cancelled() -> None:
    scene = Scene(ScriptedProvider("one", [answer("ok")]), filters=[Slow()])
    with anyio.move_on_after(0.01):
        await scene.run()
    assert (scene.row().outcome, scene.row().status) == ("cancelled", 499)
