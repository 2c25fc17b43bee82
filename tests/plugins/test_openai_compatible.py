"""The provider over real sockets: what goes out, what comes back, and its configuration."""

from __future__ import annotations

import asyncio
import gzip
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from plugins.errors import UpstreamTimeout, UpstreamUnavailable
from plugins.events import Message, Request, Started, Text, Verbatim
from plugins.interfaces import Call, ProviderSettings, Runtime, Timeout
from plugins.manager import collect_parts
from plugins.providers import openai_compatible
from plugins.providers.openai_compatible import OpenAICompatible, OpenAICompatibleType
from plugins.secrets import Secret
from tests.plugins.fake_upstream import (
    CUT,
    HANG,
    LAST_CHUNK,
    FakeUpstream,
    Step,
    answer,
    head,
    json_answer,
    one_byte_writes,
)
from tests.plugins.fake_upstream import chunk as http_chunk
from tests.plugins.openai_answers import DONE, HEL, HELLO, ROLE, USAGE, body, see, sse, usage_chunk
from tests.plugins.provider_use import (
    KEY,
    OK,
    READ,
    VERBATIM,
    chat,
    collect,
    fail,
    open_provider,
    stream_answer,
)

pytestmark = pytest.mark.anyio


# -- What goes out ---------------------------------------------------------------------------------


async def sent(request: Request, call: Call = VERBATIM, **settings: Any) -> Any:
    async with FakeUpstream(OK) as upstream:
        async with open_provider(upstream.url, **settings) as provider:
            await collect(provider, request, call)
        return upstream.requests[0]


async def test_the_request_carries_key_model_and_id() -> None:
    received = await sent(chat(), headers={"X-Title": Secret("t")})
    assert (received.method, received.target) == ("POST", "/v1/chat/completions")
    assert received.headers["authorization"] == f"Bearer {KEY}"
    assert received.headers["content-type"] == "application/json"
    assert received.headers["accept-encoding"] == "identity"
    assert received.headers["x-request-id"] == "req_1"
    assert received.headers["x-title"] == "t"
    assert received.json["model"] == "up-model"


async def test_without_a_key_no_authorization_is_sent() -> None:
    received = await sent(chat(), api_key=None)
    assert "authorization" not in received.headers


async def test_configured_headers_replace_ours() -> None:
    received = await sent(chat(), headers={"authorization": Secret("Basic x")})
    assert received.headers["authorization"] == "Basic x"


async def test_a_request_id_that_could_break_the_header_is_not_sent() -> None:
    request = chat()
    request.id = "x\r\nevil: 1"
    received = await sent(request)
    assert "x-request-id" not in received.headers
    assert "evil" not in received.headers


async def test_a_slash_at_the_end_of_the_base_url_is_the_same() -> None:
    async with FakeUpstream(OK) as upstream:
        async with open_provider(upstream.url + "/") as provider:
            await collect(provider, chat())
        assert upstream.requests[0].target == "/v1/chat/completions"


@pytest.mark.parametrize(
    ("dialect", "target"),
    [
        ("completions", "/v1/completions"),
        ("embeddings", "/v1/embeddings"),
        ("messages", "/v1/chat/completions"),
        ("responses", "/v1/chat/completions"),
    ],
)
async def test_each_dialect_has_its_path(dialect: Any, target: str) -> None:
    async with FakeUpstream(answer("", 500)) as upstream, open_provider(upstream.url) as provider:
        await fail(provider, Request("req_1", dialect, "m", prompts=["hi"], body=b"{}"))
        assert upstream.requests[0].target == target


async def test_a_request_that_was_changed_is_encoded_anew() -> None:
    request = chat()
    request.messages = [Message("user", [Text("changed")])]
    received = await sent(request, READ)
    assert received.json == {
        "model": "up-model",
        "messages": [{"role": "user", "content": "changed"}],
    }


# -- What comes back -------------------------------------------------------------------------------


@pytest.mark.parametrize("split", [False, True], ids=["whole", "bytes"])
async def test_a_canonical_answer_passes_as_it_is(split: bool) -> None:
    script: list[Step] = one_byte_writes(OK) if split else [OK]
    async with FakeUpstream(script) as upstream, open_provider(upstream.url) as provider:
        seen = see(await collect(provider, chat()))
    assert seen.bodies == [OK.partition(b"\r\n\r\n")[2]]
    assert seen.usage is not None
    assert seen.usage.prompt_tokens == USAGE["prompt_tokens"]


STREAM = sse(*HELLO, usage_chunk(), DONE)
STREAM_SCRIPTS: dict[str, list[Step]] = {
    "chunked": stream_answer(STREAM),
    "one byte each": [
        head(content_type="text/event-stream"),
        *one_byte_writes(http_chunk(STREAM)),
        LAST_CHUNK,
    ],
    "charset": [
        head(content_type="text/event-stream;charset=UTF-8"),
        http_chunk(STREAM),
        LAST_CHUNK,
    ],
    "no content type": [head(), http_chunk(STREAM), LAST_CHUNK],
    "called json": [head(content_type="application/json"), http_chunk(STREAM), LAST_CHUNK],
    "until close": [b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n", STREAM, CUT],
    "blanks first": stream_answer(b"\n\n", b"\n", STREAM),
    "gzip": [
        head(content_type="text/event-stream", content_encoding="gzip"),
        http_chunk(gzip.compress(STREAM)),
        LAST_CHUNK,
    ],
    "cut after done": stream_answer(STREAM, end=CUT),
    "cut after usage": stream_answer(sse(*HELLO, usage_chunk()), end=CUT),
    "hangs after done": stream_answer(STREAM, end=HANG),
    "json body": [json_answer(body({"content": "Hello"}))],
    "json body called a stream": [
        answer(msgspec.json.encode(body({"content": "Hello"})), content_type="text/event-stream")
    ],
}


@pytest.mark.parametrize("asked", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("script", STREAM_SCRIPTS.values(), ids=STREAM_SCRIPTS)
async def test_what_comes_decides_how_it_is_read(script: list[Step], asked: bool) -> None:
    async with FakeUpstream(script) as upstream, open_provider(upstream.url) as provider:
        events = await collect(provider, chat(stream=asked), VERBATIM if asked else READ)
    seen = see(events)
    assert (seen.text, seen.finish) == ("Hello", {0: "stop"})
    assert seen.usage is not None
    assert (seen.usage.prompt_tokens, seen.usage.completion_tokens) == (5, 2)


async def test_each_batch_is_handed_on_when_it_comes() -> None:
    more = asyncio.Event()
    script = [
        *stream_answer(sse(ROLE, HEL))[:-1],
        more,
        http_chunk(sse(*HELLO[2:], DONE)),
        LAST_CHUNK,
    ]
    async with (
        FakeUpstream(script) as upstream,
        open_provider(upstream.url) as provider,
        aclosing(provider.stream(chat(stream=True), VERBATIM)) as batches,
    ):
        assert see(await anext(batches)).text == "Hel"
        more.set()
        assert isinstance((await anext(batches))[0], Verbatim)


async def test_a_connection_is_used_again_after_a_stream() -> None:
    async with FakeUpstream(stream_answer(STREAM)) as upstream:
        async with open_provider(upstream.url) as provider:
            for _ in range(3):
                await collect(provider, chat(stream=True))
                while provider.stats()["connections_idle"] == 0:
                    await asyncio.sleep(0)
        assert upstream.num_connections == 1


async def test_the_answer_is_complete_when_only_its_end_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(openai_compatible, "GRACE_S", 0.02)
    script = stream_answer(sse(*HELLO), end=HANG)
    async with FakeUpstream(script) as upstream, open_provider(upstream.url) as provider:
        seen = see(await collect(provider, chat(stream=True)))
        assert (seen.text, seen.finish) == ("Hello", {0: "stop"})
        await upstream.client_gone.wait()


# -- Silence, and leaving --------------------------------------------------------------------------


def timeout(**seconds: float) -> Timeout:
    return Timeout(**{"connect_s": 60, "first_token_s": 60, "idle_s": 60, "total_s": 60, **seconds})


@pytest.mark.parametrize(
    "script",
    [[HANG], stream_answer(b": keep-alive\n\n", b": keep-alive\n\n", end=HANG)],
    ids=["silent", "keep-alives"],
)
async def test_no_first_token_in_time_is_a_timeout(script: list[Step]) -> None:
    limits = timeout(first_token_s=0.05)
    async with (
        FakeUpstream(script) as upstream,
        open_provider(upstream.url, timeout=limits) as provider,
    ):
        events, failure = await fail(provider, chat(stream=True))
        assert events == []
        assert isinstance(failure, UpstreamTimeout)
        await upstream.client_gone.wait()


async def test_a_role_is_no_first_token() -> None:
    limits = timeout(first_token_s=0.05, idle_s=0.01)
    gate = asyncio.Event()
    script = stream_answer(sse(ROLE), end=gate)
    script += [http_chunk(STREAM.removeprefix(sse(ROLE))), LAST_CHUNK]
    async with (
        FakeUpstream(script) as upstream,
        open_provider(upstream.url, timeout=limits) as provider,
    ):
        asyncio.get_running_loop().call_later(0.03, gate.set)  # longer than a gap may be
        assert see(await collect(provider, chat(stream=True))).text == "Hello"


async def test_roles_without_end_are_no_first_token() -> None:
    limits = timeout(first_token_s=0.05)
    async with (
        FakeUpstream(stream_answer(*[sse(ROLE)] * 100_000, end=HANG)) as upstream,
        open_provider(upstream.url, timeout=limits) as provider,
    ):
        _, failure = await fail(provider, chat(stream=True))
        assert isinstance(failure, UpstreamTimeout)
        await upstream.client_gone.wait()


async def test_a_stream_that_is_to_become_one_answer_has_a_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(openai_compatible, "MAX_ANSWER_BYTES", 10_000)
    async with (
        FakeUpstream(stream_answer(sse(ROLE), *[sse(HEL)] * 100, end=HANG)) as upstream,
        open_provider(upstream.url) as provider,
    ):
        _, failure = await fail(provider, chat())
    assert "larger than 10000 bytes" in failure.message


async def test_a_gap_in_a_stream_is_a_timeout_after_what_came() -> None:
    script = stream_answer(sse(ROLE, HEL), end=HANG)
    limits = timeout(idle_s=0.02)
    async with (
        FakeUpstream(script) as upstream,
        open_provider(upstream.url, timeout=limits) as provider,
    ):
        events, failure = await fail(provider, chat(stream=True))
    assert see(events).text == "Hel"
    assert isinstance(failure, UpstreamTimeout)


async def test_a_whole_answer_may_take_longer_than_a_first_token() -> None:
    gate = asyncio.Event()
    limits = timeout(first_token_s=0.01)
    async with (
        FakeUpstream([gate, OK]) as upstream,
        open_provider(upstream.url, timeout=limits) as provider,
    ):
        task = asyncio.create_task(collect(provider, chat()))
        await asyncio.sleep(0.05)
        gate.set()
        assert see(await task).bodies


@pytest.mark.parametrize(
    "script",
    [[HANG], stream_answer(b": hb\n\n", end=HANG), stream_answer(sse(ROLE, HEL), end=HANG)],
    ids=["before-head", "before-content", "middle"],
)
async def test_leaving_closes_the_upstream_connection(script: list[Step]) -> None:
    async with FakeUpstream(script) as upstream, open_provider(upstream.url) as provider:
        task = asyncio.create_task(collect(provider, chat(stream=True)))
        while not upstream.requests:
            await asyncio.sleep(0)
        for _ in range(20):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await upstream.client_gone.wait()
        assert provider.stats()["connections_active"] == 0


async def test_closing_the_generator_closes_the_upstream_connection() -> None:
    script = stream_answer(sse(ROLE, HEL), end=HANG)
    async with FakeUpstream(script) as upstream, open_provider(upstream.url) as provider:
        batches = provider.stream(chat(stream=True), VERBATIM)
        assert isinstance((await anext(batches))[0], Started)
        await batches.aclose()
        await upstream.client_gone.wait()


async def test_a_provider_that_is_not_started_says_so() -> None:
    provider = OpenAICompatible(ProviderSettings("up", "openai_compatible", "http://127.0.0.1:1"))
    assert not provider.ready()
    with pytest.raises(UpstreamUnavailable, match="not started"):
        await collect(provider, chat())


# -- Configuration ---------------------------------------------------------------------------------


def faults(**settings: Any) -> list[str]:
    defaults: dict[str, Any] = {"base_url": "http://a/v1"}
    return OpenAICompatibleType().check(
        ProviderSettings("up", "openai_compatible", **{**defaults, **settings})
    )


def test_a_good_table_has_no_faults() -> None:
    assert faults(api_key=Secret("k"), headers={"X-A": Secret("b")}) == []


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"base_url": ""}, "base_url: required"),
        ({"base_url": "a.example/v1"}, "base_url: must begin with http:// or https://"),
        (
            {"base_url": "http://u:p@a/v1"},
            "base_url: must not hold credentials; use api_key or headers",
        ),
        ({"headers": {"x y": Secret("1")}}, "headers.x y: not a header name"),
        ({"headers": {"Host": Secret("1")}}, "headers.Host: is set by the gateway itself"),
        ({"options": {"a": 1}}, "options: not used by this type"),
        ({"api_key": Secret("a\nb")}, "api_key: has a character that no header may carry"),
    ],
)
def test_a_bad_table_is_refused_with_the_key_and_why(settings: Any, fault: str) -> None:
    assert faults(**settings) == [fault]


def test_no_fault_tells_a_secret() -> None:
    text = "".join(faults(api_key=Secret("hush\n"), headers={"x": Secret("hush\0")}))
    assert text
    assert "hush" not in text


def test_the_type_is_registered() -> None:
    provider_type = collect_parts([], {}, Path()).provider_types["openai_compatible"]
    assert provider_type.default_base_url == ""
    built = provider_type.build(
        ProviderSettings("up", "openai_compatible", "http://a"), Runtime(Path(), Path())
    )
    assert built.name == "up"
