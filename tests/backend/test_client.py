from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from backend.client import EngineProvider, EngineType
from backend.connection import Replica
from plugins.errors import (
    ContextLengthExceeded,
    GatewayError,
    InvalidRequest,
    PayloadTooLarge,
    UpstreamError,
    UpstreamTimeout,
    UpstreamUnavailable,
)
from plugins.events import (
    Event,
    Finished,
    Message,
    Request,
    Sampling,
    Started,
    Text,
    TextDelta,
    TokenLogprob,
    Usage,
)
from plugins.interfaces import Call, ProviderSettings, Runtime, Timeout
from plugins.manager import collect_parts
from tests.backend.toy_worker import MAX_MODEL_LEN, ToyEngine
from tests.backend.worker_process import WorkerProcess

ENDLESS = 1_000_000
pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    process = WorkerProcess(tmp_path_factory.mktemp("w"))
    process.wait_ready()
    yield process
    process.kill()


@pytest.fixture
def own_worker(tmp_path: Path) -> Iterator[WorkerProcess]:
    process = WorkerProcess(tmp_path)
    process.wait_ready()
    yield process
    process.kill()


@asynccontextmanager
async def connected(
    *workers: WorkerProcess, timeout: Timeout | None = None
) -> AsyncGenerator[EngineProvider, None]:
    replicas = [Replica(f"local/{i}", worker.socket_path) for i, worker in enumerate(workers)]
    provider = EngineProvider("local", replicas, timeout or Timeout())
    await provider.start()
    try:
        await until(lambda: all(replica.ready is not None for replica in replicas))
        yield provider
    finally:
        await provider.aclose()


async def until(condition: Any) -> None:
    with anyio.fail_after(30):
        while not condition():
            await anyio.sleep(0.002)


def chat(text: str = "hi", **sampling: Any) -> Request:
    message = Message("user", [Text(text)])
    return Request("req_1", "chat", "m", messages=[message], sampling=Sampling(**sampling))


def completion(*prompts: str | list[int], **sampling: Any) -> Request:
    return Request(
        "req_1", "completions", "m", prompts=list(prompts), sampling=Sampling(**sampling)
    )


async def collect(provider: EngineProvider, request: Request) -> list[Event]:
    events: list[Event] = []
    async with aclosing(provider.stream(request, Call("toy-upstream"))) as batches:
        async for batch in batches:
            events += batch
    return events


def texts(events: list[Event]) -> dict[int, str]:
    out: dict[int, str] = {}
    for event in events:
        if isinstance(event, TextDelta):
            out[event.choice] = out.get(event.choice, "") + event.text
    return out


async def test_an_answer_starts_flows_ends_and_is_counted(worker: WorkerProcess) -> None:
    async with connected(worker) as provider:
        started, *deltas, finished, usage = await collect(provider, chat(max_tokens=8))
    assert isinstance(started, Started)
    assert started.id.startswith("chatcmpl-")
    assert (started.model, started.fingerprint[:3]) == ("toy-upstream", "fp_")
    assert texts(deltas) == {0: "user:hi>"}
    assert finished == Finished("length", 0)
    assert usage == Usage(prompt_tokens=8, completion_tokens=8, cached_tokens=4)


async def test_tokens_are_handed_on_as_they_come(worker: WorkerProcess) -> None:
    async with connected(worker) as provider:
        stream = provider.stream(chat(max_tokens=ENDLESS), Call("m"))
        async with aclosing(stream) as batches:
            assert isinstance((await anext(batches))[0], Started)
            seen = [event for _ in range(5) for event in await anext(batches)]
    assert all(isinstance(event, TextDelta) for event in seen)


async def test_two_choices_are_told_apart_and_their_prompt_is_counted_once(
    worker: WorkerProcess,
) -> None:
    async with connected(worker) as provider:
        events = await collect(provider, chat(max_tokens=4, n=2))
    assert texts(events) == {0: "user", 1: "user"}
    assert sorted(e.choice for e in events if isinstance(e, Finished)) == [0, 1]
    assert events[-1] == Usage(prompt_tokens=8, completion_tokens=8, cached_tokens=4)


async def test_several_prompts_of_a_completion_are_choices_in_order(worker: WorkerProcess) -> None:
    async with connected(worker) as provider:
        events = await collect(provider, completion("ab", [99, 100], max_tokens=2, n=2))
    assert texts(events) == {0: "ab", 1: "ab", 2: "cd", 3: "cd"}
    assert isinstance(events[0], Started)
    assert events[0].id.startswith("cmpl-")
    assert events[-1] == Usage(prompt_tokens=5, completion_tokens=8, cached_tokens=2)


async def test_a_stop_string_is_named_and_not_shown(worker: WorkerProcess) -> None:
    async with connected(worker) as provider:
        events = await collect(provider, completion("one two", stop=["two"]))
    assert texts(events) == {0: "one "}
    assert events[-2] == Finished("stop", 0, "two")


async def test_logprobs_come_with_their_text(worker: WorkerProcess) -> None:
    async with connected(worker) as provider:
        events = await collect(
            provider, completion("xy", max_tokens=2, logprobs=True, top_logprobs=1)
        )
    deltas = [event for event in events if isinstance(event, TextDelta)]
    top = [TokenLogprob("\0", -1.0, [0])]
    assert [entry for delta in deltas for entry in delta.logprobs] == [
        TokenLogprob("x", -0.5, [ord("x")], top),
        TokenLogprob("y", -0.5, [ord("y")], top),
    ]
    assert [offset for delta in deltas for offset in delta.text_offsets] == [0, 1]


async def test_a_prompt_beyond_the_context_is_refused_with_the_numbers(
    worker: WorkerProcess,
) -> None:
    async with connected(worker) as provider:
        with pytest.raises(ContextLengthExceeded) as refused:
            await collect(provider, chat("x" * MAX_MODEL_LEN))
    error = refused.value
    assert (error.status, error.code, error.param) == (400, "context_length_exceeded", "messages")
    assert f"maximum context length is {MAX_MODEL_LEN} tokens" in error.message
    assert f"resulted in {MAX_MODEL_LEN + len('user:>')} tokens" in error.message


async def test_what_the_engine_refuses_is_the_clients_own_error(worker: WorkerProcess) -> None:
    async with connected(worker) as provider:
        with pytest.raises(InvalidRequest, match="vocabulary has 257") as refused:
            await collect(provider, chat(logit_bias={999: 1.0}))
    assert (refused.value.param, refused.value.retryable) == ("logit_bias", False)


async def test_a_failed_request_is_an_upstream_error(worker: WorkerProcess) -> None:
    async with connected(worker) as provider:
        with pytest.raises(UpstreamError, match="the model failed"):
            await collect(provider, chat("fail"))


async def test_closing_the_generator_frees_the_engine_row(worker: WorkerProcess) -> None:
    async with connected(worker) as provider:
        async with aclosing(provider.stream(chat(max_tokens=ENDLESS), Call("m"))) as batches:
            await anext(batches)
            await anext(batches)
            await until(lambda: provider.stats().get("requests_running") == 1)
        await until(lambda: provider.stats()["requests_running"] == 0)
        assert provider.stats()["kv_blocks_free"] == ToyEngine.num_blocks


async def test_running_requests_are_counted_by_class(worker: WorkerProcess) -> None:
    request = chat(max_tokens=ENDLESS)
    request.klass = "batch"
    async with connected(worker) as provider:
        async with aclosing(provider.stream(request, Call("m"))) as batches:
            await anext(batches)
            await until(lambda: provider.stats().get("requests_running_batch") == 1)
        assert provider.stats()["requests_running_interactive"] == 0
        assert provider.stats()["requests_waiting_batch"] == 0


async def test_a_cancelled_reader_frees_the_engine_row(worker: WorkerProcess) -> None:
    async with connected(worker) as provider:
        with anyio.move_on_after(0.1):
            await collect(provider, chat(max_tokens=ENDLESS))
        await until(lambda: provider.stats()["requests_running"] == 0)


async def test_a_killed_worker_is_an_error_in_every_open_stream_and_a_new_one_is_found(
    own_worker: WorkerProcess,
) -> None:
    async with connected(own_worker) as provider:
        errors: list[GatewayError] = []
        flowing = 0

        async def read() -> None:
            nonlocal flowing
            try:
                async with aclosing(
                    provider.stream(chat(max_tokens=ENDLESS), Call("m"))
                ) as batches:
                    await anext(batches)
                    flowing += 1
                    async for _ in batches:
                        pass
            except GatewayError as error:
                errors.append(error)

        async with anyio.create_task_group() as tasks:
            for _ in range(5):
                tasks.start_soon(read)
            await until(lambda: flowing == 5)
            own_worker.process.kill()
        assert [type(error) for error in errors] == [UpstreamUnavailable] * 5
        assert not provider.ready()
        assert provider.stats() == {}
        with pytest.raises(UpstreamUnavailable) as away:
            await collect(provider, chat())
        assert (away.value.status, away.value.retryable) == (503, True)

        again = WorkerProcess(own_worker.socket_path.parent)
        await until(provider.ready)
        assert texts(await collect(provider, chat(max_tokens=8))) == {0: "user:hi>"}
        again.kill()


async def test_a_provider_started_before_its_worker_becomes_ready_with_it(tmp_path: Path) -> None:
    provider = EngineProvider(
        "local", [Replica("local/0", tmp_path / "engine-local-0.sock")], Timeout()
    )
    await provider.start()
    assert not provider.ready()
    worker = WorkerProcess(tmp_path)
    await until(provider.ready)
    await provider.aclose()
    assert not provider.ready()
    worker.kill()


async def test_requests_go_where_less_is_outstanding(tmp_path: Path) -> None:
    workers = [WorkerProcess(tmp_path, socket_path=tmp_path / f"{i}.sock") for i in range(2)]
    async with connected(*workers) as provider:
        streams = [provider.stream(chat(max_tokens=1000), Call("m")) for _ in range(4)]
        for stream in streams:
            await anext(stream)
        load = [replica.outstanding_tokens for replica in provider._replicas]
        assert load[0] == load[1] >= 2000
        for stream in streams:
            await stream.aclose()
        assert [replica.outstanding_tokens for replica in provider._replicas] == [0, 0]
    for worker in workers:
        worker.kill()


async def test_a_request_goes_to_the_replica_that_lives(tmp_path: Path) -> None:
    workers = [WorkerProcess(tmp_path, socket_path=tmp_path / f"{i}.sock") for i in range(2)]
    async with connected(*workers) as provider:
        workers[0].process.kill()
        await until(lambda: provider._replicas[0].ready is None)
        assert provider.ready()
        assert texts(await collect(provider, chat(max_tokens=4))) == {0: "user"}
    for worker in workers:
        worker.kill()


@pytest.mark.parametrize(
    ("timeout", "message"),
    [
        (Timeout(first_token_s=0.05), "no content within"),
        (Timeout(total_s=0.05), "took more than"),
    ],
    ids=["first token", "total"],
)
async def test_a_stalled_answer_times_out_and_frees_its_row(
    worker: WorkerProcess, timeout: Timeout, message: str
) -> None:
    async with connected(worker, timeout=timeout) as provider:
        with pytest.raises(UpstreamTimeout, match=message):
            # Nothing of this is ever safe to show: all of it may yet become the stop string.
            await collect(provider, completion("a", stop=["a" * 4000], max_tokens=ENDLESS))
        await until(lambda: provider.stats()["requests_running"] == 0)


async def test_a_silent_stream_times_out(worker: WorkerProcess) -> None:
    async with connected(worker, timeout=Timeout(idle_s=0.05)) as provider:
        with pytest.raises(UpstreamTimeout, match=r"silent for 0\.05 s"):
            request = completion("b" + "a" * 4000, stop=["a" * 4000], max_tokens=ENDLESS)
            await collect(provider, request)


async def test_a_request_larger_than_a_frame_is_refused(
    worker: WorkerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with connected(worker) as provider:
        monkeypatch.setattr("backend.protocol.MAX_FRAME_BYTES", 1000)
        with pytest.raises(PayloadTooLarge):
            await collect(provider, chat("x" * 1000))


async def test_the_engine_is_a_provider_type_of_the_house(tmp_path: Path) -> None:
    provider_type = collect_parts([], {}, tmp_path).provider_types["engine"]
    settings = ProviderSettings("local", "engine", path="demo", engine={"replicas": 2})
    provider = provider_type.build(settings, Runtime(tmp_path, tmp_path))
    assert isinstance(provider, EngineProvider)
    assert (provider.name, provider.dialects) == ("local", frozenset())


async def test_the_supervisors_process_and_the_provider_agree_on_the_socket(tmp_path: Path) -> None:
    settings = ProviderSettings("local", "engine", path="demo")
    runtime = Runtime(tmp_path, tmp_path)
    (spec,) = EngineType().processes(settings, runtime)
    worker = WorkerProcess(tmp_path, stdin=spec.stdin)
    provider = EngineType().build(settings, runtime)
    await provider.start()
    await until(provider.ready)
    await provider.aclose()
    worker.kill()


def test_a_gateway_on_uvloop_is_served_too(worker: WorkerProcess) -> None:
    async def ask() -> dict[int, str]:
        async with connected(worker) as provider:
            return texts(await collect(provider, chat(max_tokens=8)))

    assert anyio.run(ask, backend_options={"use_uvloop": True}) == {0: "user:hi>"}
