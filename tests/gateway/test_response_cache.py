"""The stage that may answer in a provider's place."""

from __future__ import annotations

from contextlib import suppress

import anyio
import pytest

from plugins.errors import UpstreamUnavailable
from plugins.events import Event, Request, Started, TextDelta
from plugins.interfaces import Principal
from plugins.testing import ScriptedProvider, Step, answer
from tests.gateway.pipeline_scene import Scene

pytestmark = pytest.mark.anyio


class Kept:
    """Keeps one answer for each model and caller, in memory."""

    enabled = True

    def __init__(self) -> None:
        self.answers: dict[tuple[str, str], list[Event]] = {}

    async def get(self, request: Request, principal: Principal) -> list[Event] | None:
        return self.answers.get((request.model, principal.name))

    async def put(self, request: Request, principal: Principal, events: list[Event]) -> None:
        self.answers[request.model, principal.name] = events


async def test_the_second_answer_is_the_first_and_asks_nobody() -> None:
    provider = ScriptedProvider("one", [answer("hi")])
    scene = Scene(provider, response_cache=Kept())
    assert await scene.run() == await scene.run()
    assert len(provider.calls) == 1
    first, second = scene.ledger.rows
    assert (second.outcome, second.usage) == ("ok", first.usage)


async def test_an_answer_that_may_be_kept_does_not_pass_as_bytes() -> None:
    provider = ScriptedProvider("one", [answer("hi")], dialects=frozenset({"chat"}))
    await Scene(provider, response_cache=Kept()).run()
    assert not provider.calls[0][1].verbatim


@pytest.mark.parametrize("end", [UpstreamUnavailable("cut"), anyio.Event()], ids=["cut", "left"])
async def test_half_an_answer_is_not_kept(end: Step) -> None:
    cache = Kept()
    provider = ScriptedProvider("one", [[Started("c", "m", 1), TextDelta("a")], end])
    scene = Scene(provider, response_cache=cache)
    with anyio.CancelScope() as scope:
        with suppress(UpstreamUnavailable):
            await scene.run(on_batch=scope.cancel if isinstance(end, anyio.Event) else int)
    assert scene.row().outcome != "ok"
    assert cache.answers == {}
