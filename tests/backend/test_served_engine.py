"""The whole way from HTTP to the engine and back, with parameters in any combination and clients that leave."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.asgi_client import exchange
from tests.backend.served_engine import HI, Served, served
from tests.gateway.answers import join_chat, read_stream

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("one_thread")]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
sampling = st.fixed_dictionaries(
    {"seed": st.integers(0, 99), "max_tokens": st.sampled_from([1, 2, 7, 30])},
    optional={
        "temperature": st.sampled_from([0, 0.7, 2]),
        "n": st.integers(1, 4),
        "stop": st.lists(st.sampled_from(["h", "\n", "é", "}", "ell", "\ufffd"]), max_size=4),
        "top_p": st.sampled_from([0, 0.4]),
        "top_k": st.sampled_from([-1, 1, 5]),
        "min_p": st.just(0.05),
        "presence_penalty": st.sampled_from([-2, 2]),
        "repetition_penalty": st.just(1.3),
        "ignore_eos": st.booleans(),
        "min_tokens": st.just(1),
        "logit_bias": st.dictionaries(st.integers(0, 271).map(str), st.sampled_from([-100, 30])),
        "stop_token_ids": st.lists(st.integers(0, 271), max_size=30),
    },
)
chat = st.fixed_dictionaries(
    {},
    optional={"response_format": st.just(FORM), "top_logprobs": st.sampled_from([0, 2, 20])},
).map(lambda f: f | {"logprobs": True} if "top_logprobs" in f else f)
completion = st.fixed_dictionaries(
    {"prompt": st.sampled_from(["hello é", [104, 20, 9], ["he", "llo"], [[5, 6], [7]]])},
    optional={"logprobs": st.sampled_from([0, 3]), "echo": st.booleans()},
)


@pytest.fixture(scope="module")
async def engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    """Blocks for a few requests only: choices preempt one another."""
    async with served(tmp_path_factory.mktemp("s"), num_blocks=16, speculative="ngram") as engine:
        yield engine


async def both_ways(
    engine: Served, path: str, body: dict[str, Any]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The answer, and the chunks of the same answer streamed."""
    whole = await engine.post(path, body)
    assert whole.status == 200, whole.body
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    return whole.json(), read_stream((await engine.post(path, body | streamed)).body)


def tokens_of(usage: dict[str, Any]) -> tuple[int, int, int]:
    return usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]


many = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@many
@given(sampling, chat)
async def test_a_chat_is_the_same_whole_and_streamed(
    engine: Served, params: dict[str, Any], fields: dict[str, Any]
) -> None:
    whole, chunks = await both_ways(engine, "/v1/chat/completions", HI | params | fields)
    streamed = join_chat(chunks)
    assert tokens_of(whole["usage"]) == tokens_of(chunks[-1]["usage"])
    assert whole["usage"]["completion_tokens"] <= params["max_tokens"] * params.get("n", 1)
    assert [choice["index"] for choice in whole["choices"]] == sorted(streamed)
    for choice in whole["choices"]:
        piece = streamed[choice["index"]]
        assert choice["message"]["content"] == piece["message"].get("content", "")
        assert choice["finish_reason"] == piece["finish_reason"]
        entries = (choice["logprobs"] or {}).get("content", [])
        assert [e["token"] for e in entries] == [e["token"] for e in piece["logprobs"]]
        assert all(len(e["top_logprobs"]) == fields["top_logprobs"] for e in entries)
        spelt = b"".join(bytes(e["bytes"]) for e in entries).decode(errors="replace")
        assert not entries or choice["message"]["content"].startswith(spelt.rstrip("\ufffd"))


@many
@given(sampling, completion)
async def test_a_completion_is_the_same_whole_and_streamed(
    engine: Served, params: dict[str, Any], fields: dict[str, Any]
) -> None:
    whole, chunks = await both_ways(engine, "/v1/completions", {"model": "m"} | params | fields)
    pieces = [choice for chunk in chunks for choice in chunk["choices"]]
    assert tokens_of(whole["usage"]) == tokens_of(chunks[-1]["usage"])
    for choice in whole["choices"]:
        mine = [piece for piece in pieces if piece["index"] == choice["index"]]
        assert choice["text"] == "".join(piece["text"] for piece in mine)
        assert [p["finish_reason"] for p in mine][-1] == choice["finish_reason"]
        assert all(piece["finish_reason"] is None for piece in mine[:-1])
        for name in ("tokens", "text_offset"):
            parts = [(p["logprobs"] or {}).get(name, []) for p in mine]
            assert (choice["logprobs"] or {}).get(name, []) == [x for p in parts for x in p]


ENDLESS = HI | {"max_tokens": 100, "ignore_eos": True, "n": 3}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_turns", [0, 1, 2, 3, 5, 8, 13, 21])
async def test_a_client_that_leaves_before_the_answer_leaves_nothing(
    engine: Served, num_turns: int, stream: bool
) -> None:
    """Time is counted in turns of the event loop, from the request's first byte on."""
    body = ENDLESS | {"stream": stream}
    async with exchange(engine.app, "/v1/chat/completions", body) as under_way:
        for _ in range(num_turns):
            await anyio.sleep(0)
        under_way.leave()
    await engine.wait_idle()
    assert (await engine.chat()).status == 200


@pytest.mark.parametrize("num_pieces", [1, 2, 3, 5, 9])
async def test_a_client_that_leaves_within_the_answer_leaves_nothing(
    engine: Served, num_pieces: int
) -> None:
    async with exchange(engine.app, "/v1/chat/completions", ENDLESS | {"stream": True}) as leaving:
        for _ in range(num_pieces):
            await leaving.some()
        leaving.leave()
    await engine.wait_idle()
    assert b'"finish_reason":"length"' not in leaving.answer.body
