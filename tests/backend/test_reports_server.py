"""Reports of users of other engines about their servers: each request goes the whole way, and so does the next."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.asgi_client import exchange
from tests.backend import tiny_llama
from tests.backend.served_engine import HI, Served, served
from tests.gateway.answers import join_chat, read_stream

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("one_thread")]
CONTEXT = tiny_llama.CONFIG.max_position
VOCAB_SIZE = tiny_llama.CONFIG.vocab_size


@pytest.fixture(scope="module")
async def engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    async with served(tmp_path_factory.mktemp("s")) as engine:
        yield engine


async def refused(engine: Served, path: str = "/v1/completions", **fields: Any) -> dict[str, Any]:
    """The error of a request that must be a 400; the engine must answer the next one."""
    body = {"model": "m", "prompt": "hello"} if path == "/v1/completions" else HI
    reply = await engine.post(path, body | fields)
    assert reply.status == 400, reply.body
    following = await engine.complete(max_tokens=3, ignore_eos=True)
    assert following.json()["usage"]["completion_tokens"] == 3
    await engine.wait_idle()
    return reply.json()["error"]


async def test_report_29_vllm_4795_logprobs_without_a_number_of_alternatives(
    engine: Served,
) -> None:
    reply = (await engine.chat(logprobs=True, ignore_eos=True)).json()
    entries = reply["choices"][0]["logprobs"]["content"]
    assert len(entries) == 6
    assert all(entry["logprob"] < 0.0 and entry["top_logprobs"] == [] for entry in entries)


@pytest.mark.parametrize("stream", [False, True])
async def test_report_30_vllm_6521_an_echo_without_output_has_the_logprobs_of_the_prompt(
    engine: Served, stream: bool
) -> None:
    fields = {"echo": True, "max_tokens": 0, "logprobs": 1, "stream": stream}
    reply = await engine.complete(prompt="hello w", **fields)
    if stream:
        chunks = read_stream(reply.body)
        first = chunks[0]["choices"][0]
    else:
        first = reply.json()["choices"][0]
        assert reply.json()["usage"]["completion_tokens"] == 0
        assert first["finish_reason"] == "length"
    assert first["text"] == "hello w"
    assert first["logprobs"]["tokens"] == ["hello", " w"]
    assert first["logprobs"]["token_logprobs"][0] is None
    assert first["logprobs"]["token_logprobs"][1] < 0.0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("length", [CONTEXT, CONTEXT + 1, 50 * CONTEXT])
async def test_report_43_vllm_765_a_prompt_over_the_limit_is_a_400_and_holds_up_nobody(
    engine: Served, length: int, stream: bool
) -> None:
    error = await refused(engine, prompt=[5] * length, stream=stream, max_tokens=1)
    assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")
    assert str(CONTEXT) in error["message"]
    assert str(length) in error["message"]


async def test_report_44_vllm_ascend_10952_one_token_over_the_limit_is_refused_with_the_numbers(
    engine: Served,
) -> None:
    error = await refused(engine, prompt=[5] * 100, max_tokens=CONTEXT - 99)
    assert (error["param"], error["code"]) == ("max_tokens", "context_length_exceeded")
    for number in (CONTEXT, 100, CONTEXT - 99, CONTEXT + 1):
        assert str(number) in error["message"]


async def test_report_44_vllm_ascend_10952_exactly_the_limit_succeeds(engine: Served) -> None:
    reply = await engine.complete(prompt=[5] * 100, max_tokens=CONTEXT - 100, ignore_eos=True)
    assert reply.json()["usage"]["total_tokens"] == CONTEXT
    assert reply.json()["choices"][0]["finish_reason"] == "length"


async def test_report_45_llama_cpp_25026_a_chat_without_max_tokens_ends_at_the_context(
    engine: Served,
) -> None:
    reply = (await engine.chat(max_tokens=None, ignore_eos=True)).json()
    assert reply["usage"]["total_tokens"] == CONTEXT
    assert reply["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": {str(VOCAB_SIZE): 1}}, "logit_bias"),
        ({"logit_bias": {"AI": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids"),
        ({"prompt": [VOCAB_SIZE]}, "prompt"),
        ({"prompt": [3, -1]}, "prompt[1]"),
        ({"prompt": [2**31 - 1]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["ok", ""]}, "prompt"),
        ({"prompt": [[]]}, "prompt[0]"),
    ],
    ids=str,
)
async def test_report_47_vllm_16529_ids_and_prompts_that_cannot_be_are_400s(
    engine: Served, fields: dict[str, Any], param: str
) -> None:
    error = await refused(engine, **fields)
    assert error["param"] == param
    assert error["code"] is not None


async def test_report_47_vllm_15041_the_same_request_id_twice_at_once_is_served_twice(
    engine: Served,
) -> None:
    """The id is the client's to say and ours to log: rows are named by connection and number."""
    named = {"x-request-id": "twice"}
    body = HI | {"max_tokens": 40, "ignore_eos": True}
    async with (
        exchange(engine.app, "/v1/chat/completions", body, headers=named) as one,
        exchange(engine.app, "/v1/chat/completions", body, headers=named) as two,
    ):
        await one.task
        await two.task
    assert [one.answer.status, two.answer.status] == [200, 200]
    await engine.wait_idle()


async def test_report_58_vllm_16976_a_chat_has_one_beginning_token_and_it_is_the_templates(
    engine: Served,
) -> None:
    """The template spells the model's own; the ids are those of its text, nothing in front, nothing behind."""
    text = "<|im_start|>user\nhello<|im_end|>\n"
    num_tokens = len(tiny_llama.tokenizer().encode(text, add_special_tokens=False).ids)
    reply = (await engine.chat()).json()
    assert reply["usage"]["prompt_tokens"] == num_tokens
    same = await engine.complete(
        prompt=tiny_llama.tokenizer().encode(text, add_special_tokens=False).ids,
        max_tokens=6,
        temperature=0,
    )
    chat = await engine.chat(temperature=0)
    assert chat.json()["choices"][0]["message"]["content"] == same.json()["choices"][0]["text"]


@pytest.mark.parametrize("stream", [False, True])
async def test_report_60_vllm_16863_choices_keep_apart_and_their_prompt_counts_once(
    engine: Served, stream: bool
) -> None:
    fields = {"n": 3, "seed": 4, "temperature": 1.2, "ignore_eos": True, "max_tokens": 20}
    streamed = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    reply = await engine.chat(**fields | streamed)
    if stream:
        chunks = read_stream(reply.body)
        usage = chunks[-1]["usage"]
        texts = [c["message"]["content"] for _, c in sorted(join_chat(chunks).items())]
    else:
        usage = reply.json()["usage"]
        choices = reply.json()["choices"]
        assert [choice["index"] for choice in choices] == [0, 1, 2]
        texts = [choice["message"]["content"] for choice in choices]
    one_by_one = [await engine.chat(**fields | {"n": 1, "seed": 4 + k}) for k in range(3)]
    assert texts == [r.json()["choices"][0]["message"]["content"] for r in one_by_one]
    assert len(set(texts)) == 3
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (
        one_by_one[0].json()["usage"]["prompt_tokens"],
        60,
    )


async def test_report_61_sglang_8250_a_json_answer_is_not_filled_up_with_whitespace(
    engine: Served,
) -> None:
    """A model that wants nothing but blanks and line breaks."""
    blanks = tiny_llama.tokenizer().encode(" \n\t ", add_special_tokens=False).ids
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    reply = await engine.chat(
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
        logit_bias={str(token): 100 for token in blanks},
        max_tokens=90,
    )
    choice = reply.json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    longest = max(len(run) for run in choice["message"]["content"].translate(_RUNS).split("x"))
    assert longest <= 13  # a line break and an indent


_RUNS = dict.fromkeys(range(33, 127), "x")
