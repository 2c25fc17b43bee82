"""The HTTP side of an inference request, over scripted providers."""

from __future__ import annotations

import gzip
import hashlib
import json
from typing import Any

import anyio
import pytest

from gateway.auth import Authenticator
from gateway.config_schema import AuthConfig, KeyConfig, KeyDigest
from gateway.endpoints.chat import ChatEndpoint
from gateway.endpoints.inference import InferenceEndpoint
from plugins.errors import Overloaded, UpstreamUnavailable
from plugins.events import Finished, Started, TextDelta, Usage
from plugins.testing import ScriptedProvider, answer
from tests.asgi_client import call, exchange
from tests.gateway.pipeline_scene import Scene

pytestmark = pytest.mark.anyio
KEY = {"authorization": "Bearer sk-test"}
BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
STARTED = Started("chatcmpl-1", "scripted", 1)


def _app(scene: Scene, max_body_bytes: int = 10_000) -> InferenceEndpoint:
    digest = KeyDigest(hashlib.sha256(b"sk-test").digest())
    auth = Authenticator(AuthConfig(keys=(KeyConfig("web", digest),)))
    refused = scene.refused.append
    return InferenceEndpoint(
        ChatEndpoint(), scene.pipeline, auth, max_body_bytes, lambda *what: refused(what)
    )


def _scene(*script: Any) -> Scene:
    return Scene(ScriptedProvider("one", list(script) or [answer("hello")]))


async def test_a_whole_answer_carries_its_request_id() -> None:
    reply = await call(_app(_scene()), body=BODY, headers=KEY)
    assert reply.status == 200
    assert reply.json()["choices"][0]["message"]["content"] == "hello"
    assert reply.headers["x-request-id"].startswith("req_")
    assert int(reply.headers["content-length"]) == len(reply.body)


async def test_a_stream_is_events_and_ends_with_done() -> None:
    reply = await call(_app(_scene()), body=BODY | {"stream": True}, headers=KEY)
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert reply.body.endswith(b"data: [DONE]\n\n")
    assert reply.done


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_before_content_has_its_real_status(stream: bool) -> None:
    scene = _scene([STARTED], Overloaded("full", retry_after_s=2.5))
    reply = await call(_app(scene), body=BODY | {"stream": stream}, headers=KEY)
    assert reply.status == 503
    assert reply.headers["retry-after"] == "3"
    assert reply.headers["retry-after-ms"] == "2500"
    assert set(reply.json()["error"]) == {"message", "type", "param", "code"}


async def test_a_failure_after_content_is_one_error_event() -> None:
    scene = _scene([STARTED, TextDelta("Hel")], UpstreamUnavailable("it broke"))
    reply = await call(_app(scene), body=BODY | {"stream": True}, headers=KEY)
    events = [e for e in reply.body.decode().split("\n\n") if e.startswith("data: {")]
    assert reply.status == 200
    assert "Hel" in events[-2]
    assert json.loads(events[-1][6:])["error"]["message"] == "it broke"


async def test_no_body_of_a_stranger_is_read() -> None:
    async with exchange(_app(_scene()), body=[b"{"]) as under_way:
        await under_way.task
        assert under_way.answer.status == 401
        assert under_way._pieces == [b"{"]


async def test_a_client_that_leaves_before_the_first_token_stops_the_work() -> None:
    never = anyio.Event()
    provider = ScriptedProvider("one", [never])
    scene = Scene(provider)
    for stream in (False, True):
        async with exchange(_app(scene), body=BODY | {"stream": stream}, headers=KEY) as client:
            await anyio.wait_all_tasks_blocked()
            assert provider.open_streams == 1
            client.leave()
        assert provider.open_streams == 0
    assert [row.outcome for row in scene.ledger.rows] == ["cancelled", "cancelled"]


async def test_a_stop_of_the_server_tells_a_stream_that_it_is_not_whole() -> None:
    scene = _scene([STARTED, TextDelta("a")], anyio.Event())
    async with exchange(_app(scene), body=BODY | {"stream": True}, headers=KEY) as client:
        while b'"a"' not in client.answer.body:
            await client.some()
        client.task.cancel()
        await client.task
        assert client.answer.done
        assert b"shutting down" in client.answer.body


@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        ({"content-type": "text/plain"}, BODY, 415),
        ({"content-encoding": "gzip"}, gzip.compress(json.dumps(BODY).encode()), 200),
        ({"content-encoding": "gzip"}, b"not gzip", 400),
        ({"content-encoding": "gzip"}, gzip.compress(json.dumps(BODY).encode())[:-9], 400),
        ({"content-encoding": "gzip"}, gzip.compress(b" " * 1_000_000), 413),
        ({"content-encoding": "br"}, b"x", 415),
        ({"content-length": "10001"}, BODY, 413),
        ({}, [b" " * 6000, b" " * 6000], 413),
        ({}, [json.dumps(BODY).encode()[:20], json.dumps(BODY).encode()[20:]], 200),
        ({}, b"{", 400),
    ],
)
async def test_bodies_are_read_within_their_limits(
    headers: dict[str, str], body: Any, status: int
) -> None:
    reply = await call(_app(_scene()), body=body, headers=KEY | headers)
    assert reply.status == status
    if status != 200:
        assert reply.json()["error"]["message"]


async def test_another_method_is_405_in_the_envelope() -> None:
    reply = await call(_app(_scene()), method="GET", headers=KEY)
    assert reply.status == 405
    assert reply.json()["error"]["code"] == "method_not_supported"


async def test_batches_reach_the_client_as_they_come() -> None:
    more = anyio.Event()
    script = [[STARTED, TextDelta("a")], more, [TextDelta("b"), Finished("stop"), Usage(1, 2)]]
    async with exchange(_app(_scene(*script)), body=BODY | {"stream": True}, headers=KEY) as client:
        while b'"a"' not in client.answer.body:
            await client.some()
        assert b'"b"' not in client.answer.body
        more.set()
        await client.task
        assert b'"b"' in client.answer.body


async def test_what_leaves_no_row_is_counted_apart() -> None:
    scene = _scene()
    await call(_app(scene), body=BODY)
    await call(_app(scene), body=b"{", headers=KEY)
    await call(_app(scene), body=BODY | {"model": "other"}, headers=KEY)
    assert scene.refused == [("chat", 401), ("chat", 400)]
    assert [row.status for row in scene.ledger.rows] == [404]
