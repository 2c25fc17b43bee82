"""The embeddings dialect: inputs of every form in, vectors in their order and in the asked form out."""

from __future__ import annotations

import base64
import hashlib
import json
import struct
from typing import Any

import anyio
import pytest

from gateway.auth import Authenticator
from gateway.config_schema import AuthConfig, KeyConfig, KeyDigest
from gateway.endpoints.embeddings import EmbeddingsEndpoint
from gateway.endpoints.inference import InferenceEndpoint
from plugins.errors import InvalidRequest, UpstreamError, UpstreamUnavailable
from plugins.events import (
    Embedding,
    EmbeddingForm,
    Event,
    Failed,
    Finished,
    Request,
    Started,
    TextDelta,
    Usage,
    Verbatim,
)
from plugins.interfaces import Context, Limits, Principal
from plugins.testing import ScriptedProvider, answer
from tests.asgi_client import Answer, call, exchange
from tests.gateway.pipeline_scene import Scene

STARTED = Started("embd-1", "up-model", 1)
FIRST, SECOND = Embedding.of([0.25, -1.5], 0), Embedding.of([3.0, 0.0], 1)
USAGE = Usage(prompt_tokens=5)


def request_of(**fields: Any) -> Request:
    body = {"model": "m", "input": "hi"} | fields
    return EmbeddingsEndpoint().decode(json.dumps(body).encode(), "req_1", 0.0)


def collected(request: Request, *events: Event) -> dict[str, Any]:
    collector = EmbeddingsEndpoint().collector(request)
    collector.add(list(events))
    return json.loads(collector.body())


# -- Bodies ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("hi", ["hi"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        (["a"] * 2048, ["a"] * 2048),
        ([1] * 3000, [[1] * 3000]),
    ],
    ids=lambda value: json.dumps(value)[:20],
)
def test_inputs_are_text_or_token_ids_one_or_many(value: object, expected: list[Any]) -> None:
    request = request_of(input=value)
    assert (request.dialect, request.prompts, request.stream) == ("embeddings", expected, False)


def test_floats_of_the_models_own_length_are_the_default_and_null_is_the_default() -> None:
    nulls = {"encoding_format": None, "dimensions": None, "user": None, "stream": None}
    assert request_of().embedding == request_of(**nulls).embedding == EmbeddingForm()
    asked = request_of(encoding_format="base64", dimensions=2, user="u", stream=False)
    assert asked.embedding == EmbeddingForm(dimensions=2, encoding_format="base64")
    assert asked.user == "u"


def test_fields_of_other_servers_travel_as_extra() -> None:
    assert request_of(truncate_prompt_tokens=5).extra == {"truncate_prompt_tokens": 5}


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"input": None}, "input", "missing_required_parameter"),
        ({"input": ""}, "input", "invalid_value"),
        ({"input": []}, "input", "empty_array"),
        ({"input": ["a", "b", "c", ""]}, "input[3]", "invalid_value"),
        ({"input": [[1], []]}, "input[1]", "empty_array"),
        ({"input": ["a"] * 2049}, "input", "array_above_max_length"),
        ({"input": {"a": 1}}, "input", "invalid_type"),
        ({"input": ["a", 1]}, "input", "invalid_type"),
        ({"input": [["a"]]}, "input[0][0]", "invalid_type"),
        ({"input": [-1]}, "input[0]", "integer_below_min_value"),
        ({"dimensions": 0}, "dimensions", "integer_below_min_value"),
        ({"dimensions": "2"}, "dimensions", "invalid_type"),
        ({"encoding_format": "hex"}, "encoding_format", "invalid_value"),
        ({"encoding_format": 1}, "encoding_format", "invalid_type"),
        ({"stream": True}, "stream", "invalid_value"),
        ({"model": None}, None, None),
    ],
    ids=lambda value: json.dumps(value)[:40],
)
def test_a_bad_value_is_refused_with_its_place_and_code(
    fields: dict[str, Any], param: str | None, code: str | None
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        request_of(**fields)
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, param, code)


# -- Answers ---------------------------------------------------------------------------------------------------------


def test_vectors_come_in_the_order_of_the_inputs_with_usage() -> None:
    events = STARTED, SECOND, FIRST, Finished("stop"), USAGE
    assert collected(request_of(input=["a", "b"]), *events) == {
        "object": "list",
        "data": [
            {"object": "embedding", "index": 0, "embedding": [0.25, -1.5]},
            {"object": "embedding", "index": 1, "embedding": [3.0, 0.0]},
        ],
        "model": "up-model",
        "usage": {"prompt_tokens": 5, "total_tokens": 5},
    }


def test_base64_is_little_endian_float32() -> None:
    request = request_of(encoding_format="base64")
    body = collected(request, STARTED, FIRST, Finished("stop"), USAGE)
    text = body["data"][0]["embedding"]
    assert struct.unpack("<2f", base64.b64decode(text)) == (0.25, -1.5)


def test_a_verbatim_body_is_the_answer() -> None:
    collector = EmbeddingsEndpoint().collector(request_of())
    collector.add([STARTED, Verbatim(b'{"a": 1}', finished=(Finished("stop"),)), USAGE])
    assert collector.body() == b'{"a": 1}'


def test_usage_that_nobody_told_is_estimated() -> None:
    body = collected(request_of(input="eight ch"), STARTED, FIRST, Finished("stop"))
    assert body["usage"] == {"prompt_tokens": 2, "total_tokens": 2}


@pytest.mark.parametrize(
    "events",
    [(STARTED,), (STARTED, FIRST), (STARTED, Finished("stop")), answer("a chat's answer")],
    ids=["nothing", "no end", "no vector", "text"],
)
def test_an_answer_that_is_not_whole_is_the_upstreams_failure(events: Any) -> None:
    with pytest.raises(UpstreamUnavailable):
        collected(request_of(), *events)


def test_a_vector_too_many_is_the_upstreams_failure() -> None:
    with pytest.raises(UpstreamUnavailable, match="1 inputs with 2 embeddings"):
        collected(request_of(), STARTED, FIRST, SECOND, Finished("stop"))


def test_a_failure_told_as_an_event_is_raised() -> None:
    with pytest.raises(UpstreamError, match="it broke"):
        collected(request_of(), STARTED, Failed("it broke"))


# -- The line that every request follows -----------------------------------------------------------------------------


def _app(scene: Scene) -> InferenceEndpoint:
    digest = KeyDigest(hashlib.sha256(b"sk-test").digest())
    auth = Authenticator(AuthConfig(keys=(KeyConfig("web", digest),)))
    return InferenceEndpoint(
        EmbeddingsEndpoint(), scene.pipeline, auth, 10_000, lambda *what: scene.refused.append(what)
    )


def _vectors(*events: Event) -> ScriptedProvider:
    script = list(events) or [STARTED, FIRST, Finished("stop"), USAGE]
    return ScriptedProvider("one", [script], embeds=True)


async def _post(scene: Scene, **fields: Any) -> Answer:
    body = {"model": "m", "input": "hi"} | fields
    return await call(
        _app(scene), path="/v1/embeddings", body=body, headers={"authorization": "Bearer sk-test"}
    )


@pytest.mark.anyio
async def test_a_good_request_leaves_one_row_with_its_usage() -> None:
    scene = Scene(_vectors())
    reply = await _post(scene)
    assert (reply.status, reply.json()["data"][0]["embedding"]) == (200, [0.25, -1.5])
    row = scene.row()
    assert (row.dialect, row.outcome, row.usage.prompt_tokens) == ("embeddings", "ok", 5)


@pytest.mark.anyio
async def test_an_answer_without_usage_is_charged_for_its_inputs_alone() -> None:
    scene = Scene(_vectors(STARTED, FIRST, SECOND, Finished("stop")))
    await _post(scene, input=["12345678", "12345678"])
    usage = scene.row().usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.estimated) == (4, 0, True)


@pytest.mark.anyio
async def test_inputs_are_counted_against_the_keys_limits() -> None:
    scene = Scene(_vectors())
    who = Principal("k", limits=Limits(tpm=10))
    request = request_of(input=[[1] * 6, [1] * 5])
    with pytest.raises(Exception, match="may need 11"):
        async for _ in scene.pipeline.run(request, who):
            pass
    assert scene.row().outcome == "rejected"


@pytest.mark.anyio
async def test_a_filter_sees_and_changes_the_inputs() -> None:
    class Redact:
        async def apply(self, request: Request, context: Context) -> Request:
            request.prompts = [str(text).replace("secret", "***") for text in request.prompts]
            return request

    provider = _vectors()
    await _post(Scene(provider, filters=[Redact()]), input="a secret")
    ((request, sent),) = provider.calls
    assert (request.prompts, sent.verbatim) == (["a ***"], False)


@pytest.mark.anyio
async def test_a_transform_for_text_leaves_vectors_alone() -> None:
    class Shout:
        def feed(self, events: list[Event]) -> list[Event]:
            return events

        def flush(self) -> list[Event]:
            return [TextDelta("!")]

    scene = Scene(_vectors(), transforms=[lambda request, context: Shout()])
    assert (await _post(scene)).json()["data"][0]["embedding"] == [0.25, -1.5]


@pytest.mark.anyio
async def test_a_model_of_chats_only_is_a_400_that_names_it() -> None:
    scene = Scene(ScriptedProvider("one", [answer("hi")]))
    reply = await _post(scene)
    error = reply.json()["error"]
    assert (reply.status, error["param"], error["code"]) == (400, "model", "unsupported_parameter")
    assert scene.row().outcome == "rejected"


@pytest.mark.anyio
async def test_a_target_that_gives_no_embeddings_is_passed_over() -> None:
    chat_only = ScriptedProvider("chat", [answer("hi")])
    assert (await _post(Scene(chat_only, _vectors()))).status == 200
    assert chat_only.calls == []


@pytest.mark.anyio
async def test_a_failed_target_falls_back_to_the_next() -> None:
    down = ScriptedProvider("down", [UpstreamUnavailable("down")], embeds=True)
    scene = Scene(down, _vectors())
    assert (await _post(scene)).status == 200
    assert scene.row().attempts == 2


@pytest.mark.anyio
async def test_a_client_that_leaves_stops_the_work() -> None:
    provider = ScriptedProvider("one", [[STARTED, FIRST], anyio.Event()], embeds=True)
    scene = Scene(provider)
    headers = {"authorization": "Bearer sk-test"}
    async with exchange(_app(scene), body={"model": "m", "input": "x"}, headers=headers) as client:
        await anyio.wait_all_tasks_blocked()
        assert provider.open_streams == 1
        client.leave()
    assert provider.open_streams == 0
    assert scene.row().outcome == "cancelled"


@pytest.mark.anyio
async def test_an_error_has_the_openai_envelope() -> None:
    reply = await _post(Scene(_vectors()), input=["a", ""])
    assert reply.status == 400
    assert reply.json() == {
        "error": {
            "message": "Invalid 'input[1]': an empty string has no embedding.",
            "type": "invalid_request_error",
            "param": "input[1]",
            "code": "invalid_value",
        }
    }


@pytest.mark.anyio
async def test_text_in_place_of_vectors_is_the_upstreams_failure() -> None:
    provider = ScriptedProvider("one", [answer("text")], embeds=True)
    assert (await _post(Scene(provider))).status == 502
