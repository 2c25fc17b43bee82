"""Upstreams that answer with an error: with a status, in a 200, in the middle of a stream."""

from __future__ import annotations

from typing import Any

import pytest

from plugins.errors import UpstreamError, UpstreamUnavailable
from plugins.providers import openai_compatible
from tests.plugins.fake_upstream import (
    CUT,
    HANG,
    LAST_CHUNK,
    RESET,
    FakeUpstream,
    Step,
    answer,
    json_answer,
)
from tests.plugins.openai_answers import DONE, HEL, ROLE, see, sse
from tests.plugins.provider_use import (
    KEY,
    chat,
    fail,
    open_provider,
    stream_answer,
)

pytestmark = pytest.mark.anyio


# -- Errors with a status --------------------------------------------------------------------------


def error(message: str, **fields: Any) -> dict[str, Any]:
    return {"error": {"message": message, "type": "x", "param": None, "code": None, **fields}}


async def failure_of(script: bytes | list[Step], stream: bool = False) -> UpstreamError:
    async with FakeUpstream(script) as upstream, open_provider(upstream.url) as provider:
        events, failure = await fail(provider, chat(stream=stream))
        assert events == []
        assert str(upstream.port) not in failure.message
    assert KEY not in failure.message
    return failure


async def test_a_400_keeps_message_type_param_and_code() -> None:
    fields = {"type": "invalid_request_error", "param": "temperature", "code": "unsupported_value"}
    failure = await failure_of(json_answer(error("Unsupported value", **fields), 400))
    assert (failure.status, failure.message) == (400, "Unsupported value")
    assert (failure.type, failure.param, failure.code) == tuple(fields.values())
    assert not failure.retryable


@pytest.mark.parametrize("field", ["type", "param", "code"])
async def test_a_key_that_an_upstream_echoes_in_any_field_is_hidden(field: str) -> None:
    echo = {field: f"Authorization: Bearer {KEY}"}
    failure = await failure_of(json_answer(error("no", **echo), 400))
    assert KEY not in f"{failure.type} {failure.param} {failure.code}"


@pytest.mark.parametrize("status", [404, 408, 429, 500, 503, 529])
async def test_failures_of_one_target_may_be_tried_elsewhere(status: int) -> None:
    failure = await failure_of(json_answer(error("no"), status), stream=True)
    assert (failure.status, failure.message) == (status, "no")
    assert failure.retryable


@pytest.mark.parametrize("status", [401, 403])
async def test_a_refusal_of_our_key_shows_nothing_of_it(status: int) -> None:
    text = "Incorrect API key provided: sk-up1****. See https://example.com/keys"
    failure = await failure_of(json_answer(error(text, code="invalid_api_key"), status))
    assert failure.status == status
    assert "sk-" not in failure.message
    assert failure.code == "upstream_refused"
    assert failure.retryable


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"error": "plain text"}, "plain text"),
        ({"message": "at the top", "code": 42}, "at the top"),
        ({"detail": "not found"}, "not found"),
        ({"detail": [{"msg": "field required", "loc": ["body"]}]}, "field required"),
        ({"object": "error", "message": "vllm", "code": 400}, "vllm"),
        ([{"error": {"message": "google", "code": 400}}], "google"),
        ({"error": {"message": 7}}, "status 422"),
        ({}, "status 422"),
        (None, "status 422"),
    ],
)
async def test_error_bodies_of_all_forms_are_read(document: Any, message: str) -> None:
    failure = await failure_of(json_answer(document, 422))
    assert failure.status == 422
    assert message in failure.message
    assert failure.code is None or isinstance(failure.code, str)


@pytest.mark.parametrize(
    "script",
    [
        answer("<html>Internal sk-upstream-secret</html>", 502, content_type="text/html"),
        answer("", 502),
        [b"HTTP/1.1 502 X\r\ncontent-length: 99\r\n\r\n{", CUT],
        answer(b'{"error":' + b"[" * 100_000, 502),
        answer(b" " * 1_000_000, 502),
    ],
    ids=["html", "empty", "cut", "deep", "huge"],
)
async def test_an_error_body_that_cannot_be_read_is_not_shown(script: Any) -> None:
    failure = await failure_of(script)
    assert (failure.status, failure.message) == (
        502,
        "provider up: answered with an error and status 502",
    )


async def test_an_error_body_that_does_not_end_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(openai_compatible, "GRACE_S", 0.02)
    failure = await failure_of([b"HTTP/1.1 503 X\r\ncontent-length: 99\r\n\r\n{", HANG])
    assert failure.status == 503


@pytest.mark.parametrize(
    "text",
    [
        f"bad key {KEY} given",
        "bad key sk-proj-abc****wxyz given",
        "bad key ****************1234 given",
        "Bearer abc.def given",
    ],
)
async def test_keys_in_an_error_text_are_blanked(text: str) -> None:
    failure = await failure_of(json_answer(error(text), 400))
    assert "***" in failure.message
    assert not {"1234", "abc", "wxyz", "secret"} & set(failure.message.replace("*", " ").split())
    assert failure.message.endswith("given")


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry_after": "17"}, 17.0),
        ({"retry_after": "1.5"}, 1.5),
        ({"retry_after_ms": "250", "retry_after": "9"}, 0.25),
        ({"retry_after": "Fri, 15 Jan 2027 08:01:40 GMT"}, 100.0),
        ({"retry_after": "Fri, 15 Jan 2027 07:00:00 GMT"}, 0.0),
        ({"retry_after": "soon"}, None),
        ({"retry_after": "-1"}, None),
        ({"retry_after": "nan"}, None),
        ({}, None),
    ],
)
async def test_retry_after_is_kept_in_all_its_forms(
    headers: dict[str, str], seconds: float | None
) -> None:
    failure = await failure_of(json_answer(error("slow down"), 429, **headers))
    assert failure.retry_after_s == seconds


async def test_a_redirect_is_not_followed() -> None:
    failure = await failure_of(answer("", 307, location="http://elsewhere.example/"))
    assert isinstance(failure, UpstreamUnavailable)
    assert failure.status == 502
    assert "elsewhere" not in failure.message


# -- 200, and yet a failure ------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("script", "status"),
    [
        (json_answer({"error": {"message": "Rate limit exceeded", "code": 429}}), 429),
        (answer("<html>Sign in</html>", content_type="text/html"), 502),
        (answer("upstream connect error", content_type="text/plain"), 502),
        (answer(""), 502),
        (answer("", 204), 502),
        (answer("[]", content_type="application/json"), 502),
        (stream_answer(sse({"error": {"message": "engine died", "code": 500}})), 500),
        (stream_answer(sse(DONE)), 502),
        (stream_answer(b": hb\n\n"), 502),
    ],
    ids=[
        "error",
        "html",
        "text",
        "empty",
        "204",
        "list",
        "first-event",
        "only-done",
        "only-comments",
    ],
)
async def test_a_200_without_an_answer_fails_before_anything_is_given(
    script: Any, status: int, stream: bool
) -> None:
    failure = await failure_of(script, stream)
    assert failure.status == status
    assert failure.retryable
    assert "<html" not in failure.message


@pytest.mark.parametrize("end", [CUT, RESET, LAST_CHUNK], ids=["cut", "reset", "clean"])
async def test_a_stream_that_breaks_gives_what_came_and_then_fails(end: Step) -> None:
    script = stream_answer(sse(ROLE, HEL), end=end)
    async with FakeUpstream(script) as upstream, open_provider(upstream.url) as provider:
        events, failure = await fail(provider, chat(stream=True))
    seen = see(events)
    assert (seen.text, seen.finish) == ("Hel", {})
    assert isinstance(failure, UpstreamUnavailable)


async def test_the_text_of_a_mid_stream_error_is_cleaned() -> None:
    script = stream_answer(sse(ROLE, HEL, {"error": {"message": f'bad "q"\n\ndata: x {KEY}'}}))
    async with FakeUpstream(script) as upstream, open_provider(upstream.url) as provider:
        _, failure = await fail(provider, chat(stream=True))
    assert failure.message == 'bad "q"\n\ndata: x ***'
