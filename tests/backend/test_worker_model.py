"""The whole engine side with the real demo model: worker process, socket, provider."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from backend.client import EngineProvider
from backend.connection import Replica
from backend.options import EngineOptions, WorkerSettings
from backend.protocol import encode_frame
from gateway.endpoints.completions_encode import CompletionsCollector
from plugins.errors import ContextLengthExceeded, InvalidRequest
from plugins.events import (
    Embedding,
    EmbeddingForm,
    Finished,
    Message,
    Request,
    ResponseFormat,
    Sampling,
    Text,
    TextDelta,
    Tool,
    ToolCallDelta,
    ToolChoice,
    Usage,
)
from plugins.interfaces import Call, Timeout
from tests.backend.worker_process import WorkerProcess

pytestmark = [pytest.mark.anyio, pytest.mark.model]
NUM_STREAMS = 32
NUM_BLOCKS = 36  # far too few for all of them at once


@pytest.fixture(scope="module")
def worker(
    demo_model_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[WorkerProcess]:
    run_dir = tmp_path_factory.mktemp("w")
    settings = WorkerSettings(
        "local/0",
        str(run_dir / "engine-local-0.sock"),
        str(demo_model_path),
        str(run_dir),
        threads=2,
        options=EngineOptions(dtype="float32", num_blocks=NUM_BLOCKS, max_model_len=512),
    )
    process = WorkerProcess(
        run_dir,
        argv=(sys.executable, "-m", "backend.worker"),
        stdin=bytes(encode_frame(settings)),
    )
    process.wait_ready()
    yield process
    process.kill()


class Connected:
    """The provider, connected for the length of one test."""

    def __init__(self, worker: WorkerProcess) -> None:
        self.provider = EngineProvider("local", [Replica("local/0", worker.socket_path)], Timeout())

    async def __aenter__(self) -> EngineProvider:
        await self.provider.start()
        with anyio.fail_after(30):
            while not self.provider.ready():
                await anyio.sleep(0.01)
        return self.provider

    async def __aexit__(self, *exc: object) -> None:
        await self.provider.aclose()


def greedy(i: int) -> Request:
    """Prompts and answers of different lengths."""
    text = f"Tell me about the number {i}. " + "Be brief. " * (i % 7)
    sampling = Sampling(temperature=0.0, max_tokens=3 + i // 2, ignore_eos=True)
    return Request("r", "chat", "m", messages=[Message("user", [Text(text)])], sampling=sampling)


async def answer(provider: EngineProvider, request: Request) -> str:
    text = ""
    async with aclosing(provider.stream(request, Call("m"))) as batches:
        async for batch in batches:
            text += "".join(event.text for event in batch if isinstance(event, TextDelta))
    return text


async def test_many_streams_at_once_say_what_each_says_alone(worker: WorkerProcess) -> None:
    async with Connected(worker) as provider:
        alone = [await answer(provider, greedy(i)) for i in range(NUM_STREAMS)]
        together = [""] * NUM_STREAMS

        async def one(i: int) -> None:
            together[i] = await answer(provider, greedy(i))

        async with anyio.create_task_group() as tasks:
            for i in range(NUM_STREAMS):
                tasks.start_soon(one, i)
        assert together == alone
        with anyio.fail_after(30):
            while provider.stats()["requests_running"]:
                await anyio.sleep(0.01)
        stats = provider.stats()
        assert stats["kv_blocks_free"] == stats["kv_blocks"] == NUM_BLOCKS


async def vectors(provider: EngineProvider, *texts: str, dimensions: int | None = None) -> Any:
    """[num_texts, dimensions]"""
    request = Request("r", "embeddings", "m", prompts=[*texts], embedding=EmbeddingForm(dimensions))
    async with aclosing(provider.stream(request, Call("m"))) as batches:
        events = [event async for batch in batches for event in batch]
    assert events[-2] == Finished("stop")
    found = {event.index: event.values() for event in events if isinstance(event, Embedding)}
    return np.array([found[i] for i in range(len(texts))])


async def test_sentences_of_one_meaning_lie_nearer_than_those_of_another(
    worker: WorkerProcess,
) -> None:
    async with Connected(worker) as provider:
        found = await vectors(
            provider,
            "The cat sits on the mat.",
            "A kitten is resting on a rug.",
            "The stock market fell sharply today.",
            "Share prices dropped on Wall Street.",
        )
    near = found @ found.T
    assert found.shape == (4, 576)
    assert min(near[0, 1], near[2, 3]) > near[:2, 2:].max() + 0.05


async def test_vectors_beside_chats_are_those_of_each_alone(worker: WorkerProcess) -> None:
    texts = [f"Text number {i}. " + "More of it. " * (2 * i) for i in range(6)]
    async with Connected(worker) as provider:
        alone = [await vectors(provider, text) for text in texts]
        together, chats = [], []

        async def chat(i: int) -> None:
            chats.append(await answer(provider, greedy(i)))

        async with anyio.create_task_group() as tasks:
            for i in range(4):
                tasks.start_soon(chat, i)
            together = await vectors(provider, *texts)
        assert len(chats) == 4
        np.testing.assert_allclose(together, np.concatenate(alone), atol=1e-5)


async def test_a_client_that_leaves_an_embeddings_request_frees_every_block(
    worker: WorkerProcess,
) -> None:
    request = Request("r", "embeddings", "m", prompts=["word " * 50] * 50)
    async with Connected(worker) as provider:
        async with aclosing(provider.stream(request, Call("m"))) as batches:
            async for batch in batches:
                if any(isinstance(event, Embedding) for event in batch):
                    break
        with anyio.fail_after(30):
            while provider.stats()["kv_blocks_free"] < NUM_BLOCKS:
                await anyio.sleep(0.01)


async def test_more_dimensions_than_the_model_has_are_refused(worker: WorkerProcess) -> None:
    async with Connected(worker) as provider:
        assert (await vectors(provider, "a", dimensions=7)).shape == (1, 7)
        with pytest.raises(InvalidRequest, match="between 1 and 576, got 577") as caught:
            await vectors(provider, "a", dimensions=577)
    assert caught.value.param == "dimensions"


async def test_the_demo_model_knows_the_capital_of_france(worker: WorkerProcess) -> None:
    question = Message("user", [Text("What is the capital of France?")])
    request = Request("r", "chat", "m", messages=[question], sampling=Sampling(temperature=0.0))
    events = []
    async with (
        Connected(worker) as provider,
        aclosing(provider.stream(request, Call("m"))) as batches,
    ):
        async for batch in batches:
            events += batch
    assert "".join(e.text for e in events if isinstance(e, TextDelta)) == (
        "The capital of France is Paris."
    )
    assert events[-2] == Finished("stop", 0)
    assert isinstance(events[-1], Usage)
    assert (events[-1].prompt_tokens, events[-1].completion_tokens) == (37, 8)


async def completion(worker: WorkerProcess, *prompts: str | list[int], **sampling: Any) -> Any:
    """The answer of /v1/completions, as JSON."""
    request = Request("r", "completions", "m", prompts=[*prompts], sampling=Sampling(**sampling))
    collector = CompletionsCollector(request)
    async with (
        Connected(worker) as provider,
        aclosing(provider.stream(request, Call("m"))) as batches,
    ):
        async for batch in batches:
            collector.add(batch)
    body = collector.body()
    assert b"NaN" not in body
    return json.loads(body)


async def test_an_echo_with_logprobs_has_no_value_for_its_first_token(
    worker: WorkerProcess,
) -> None:
    prompt = "correct horse battery staple"
    settings = {"temperature": 1.0, "top_k": 1, "max_tokens": 3}
    answer = await completion(worker, prompt, echo=True, logprobs=True, top_logprobs=1, **settings)
    (choice,) = answer["choices"]
    lists = choice["logprobs"]
    assert choice["text"].startswith(prompt)
    assert (lists["token_logprobs"][0], lists["top_logprobs"][0]) == (None, None)
    assert all(value <= 0.0 for value in lists["token_logprobs"][1:])
    assert "".join(lists["tokens"]) == choice["text"]
    for token, offset in zip(lists["tokens"], lists["text_offset"], strict=True):
        assert choice["text"].startswith(token, offset)


async def test_a_prompt_is_scored_without_an_answer(worker: WorkerProcess) -> None:
    """What evaluation harnesses send to rank answers: engine-peers 6, report 30."""
    sampling = {"echo": True, "logprobs": True, "top_logprobs": 1, "max_tokens": 0}
    texts = ["The capital of France is Paris.", "The capital of France is cheese."]
    answer = await completion(worker, *texts, **sampling)
    assert [choice["text"] for choice in answer["choices"]] == texts
    paris, cheese = (sum(c["logprobs"]["token_logprobs"][1:]) for c in answer["choices"])
    assert paris > cheese + 3
    assert answer["usage"]["completion_tokens"] == 0


async def test_the_best_of_three_is_the_likeliest(worker: WorkerProcess) -> None:
    settings = {
        "max_tokens": 6,
        "temperature": 1.5,
        "seed": 1,
        "logprobs": True,
        "ignore_eos": True,
    }
    all_three = await completion(worker, "Once upon", n=3, **settings)
    (best,) = (await completion(worker, "Once upon", n=1, best_of=3, **settings))["choices"]
    means = {c["text"]: sum(c["logprobs"]["token_logprobs"]) for c in all_three["choices"]}
    assert best["text"] == max(means, key=means.__getitem__)


async def test_a_long_prompt_is_refused_with_the_numbers(worker: WorkerProcess) -> None:
    message = Message("user", [Text("word " * 600)])
    request = Request("r", "chat", "m", messages=[message])
    async with Connected(worker) as provider:
        with pytest.raises(ContextLengthExceeded, match=r"512 tokens.*resulted in 6\d\d tokens"):
            await answer(provider, request)


async def test_the_demo_model_answers_in_the_schema_asked_for(worker: WorkerProcess) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 30}, "big": {"type": "boolean"}},
        "required": ["city", "big"],
        "additionalProperties": False,
    }
    question = Message("user", [Text("Name a city in France, and whether it is big.")])
    request = Request(
        "r",
        "chat",
        "m",
        messages=[question],
        sampling=Sampling(temperature=1.0, seed=5, max_tokens=80),
        response_format=ResponseFormat("json_schema", schema, "city", strict=True),
    )
    async with Connected(worker) as provider:
        value = json.loads(await answer(provider, request))
    assert list(value) == ["city", "big"]
    assert isinstance(value["big"], bool)


async def test_the_demo_model_calls_a_tool_that_must_be_called(worker: WorkerProcess) -> None:
    parameters = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 30}},
        "required": ["city"],
    }
    request = Request(
        "r",
        "chat",
        "m",
        messages=[Message("user", [Text("What is the weather in Paris?")])],
        sampling=Sampling(temperature=0.0, max_tokens=80),
        tools=[Tool("get_weather", "The weather of a city.", parameters)],
        tool_choice=ToolChoice("required"),
        parallel_tool_calls=False,
    )
    async with Connected(worker) as provider:
        events = [e async for batch in provider.stream(request, Call("m")) for e in batch]
    calls = [event for event in events if isinstance(event, ToolCallDelta)]
    assert calls[0].name == "get_weather"
    assert json.loads("".join(call.arguments for call in calls)) == {"city": "Paris"}
    assert Finished("tool_calls", 0) in events
