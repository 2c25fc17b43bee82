"""The main job, whole: a real model behind a real server answers a real client, and outlives its parts."""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from openai import APIStatusError, OpenAI

from tests.serving import Tidegate, Upstream, run_tidegate, serving, upstream, wait_until

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = json.loads((ROOT / "tests/backend/data/golden_smollm2_f32.json").read_text())
pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(300)]

CONFIG = """
[auth]
mode = "keys"
[[auth.keys]]
name = "web"
key = "sk-test"
[[auth.keys]]
name = "narrow"
key = "sk-narrow"
models = ["remote"]

[[providers]]
name = "local"
type = "engine"
path = "{model}"
[[providers]]
name = "up"
type = "openai_compatible"
base_url = "{upstream}"
api_key = "sk-upstream-secret"
max_retries = 0
breaker = {{ failures = 0 }}

[[models]]
name = "smollm2"
targets = ["local/smollm2"]
[[models]]
name = "remote"
targets = ["up/up-model"]
[[models]]
name = "remote-first"
targets = ["up/up-model", "local/smollm2"]
[[models]]
name = "local-first"
targets = ["local/smollm2", "up/up-model"]
"""


@pytest.fixture(scope="module")
def peer() -> Iterator[Upstream]:
    with upstream() as state:
        yield state


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, demo_model_path: Path, peer: Upstream
) -> Iterator[Tidegate]:
    config = CONFIG.format(model=demo_model_path, upstream=peer.url)
    with serving(tmp_path_factory.mktemp("serve"), config) as running:
        yield running


@pytest.fixture
def client(server: Tidegate, peer: Upstream) -> Iterator[OpenAI]:
    peer.mode = "ok"
    with OpenAI(base_url=f"{server.url}/v1", api_key="sk-test", max_retries=0) as openai:
        yield openai


def _chat(content: str, model: str = "smollm2", **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    return {"model": model, "messages": messages, "temperature": 0, **fields}


def _engine_is_idle(server: Tidegate) -> bool:
    running = server.metric("tidegate_provider_requests_running", provider="local")
    free = server.metric("tidegate_provider_kv_blocks_free", provider="local")
    return running == 0 and free == server.metric("tidegate_provider_kv_blocks", provider="local")


def test_the_official_client_chats_streams_and_lists_models(client: OpenAI) -> None:
    question = _chat("What is the capital of France?")
    whole = client.chat.completions.create(**question)
    assert whole.choices[0].message.content == "The capital of France is Paris."
    assert whole.usage
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (37, 8)
    chunks = list(client.chat.completions.create(**question, stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == (
        whole.choices[0].message.content
    )
    assert {model.id for model in client.models.list()} >= {"smollm2", "remote"}
    assert client.models.retrieve("smollm2").id == "smollm2"
    text = client.completions.create(model="smollm2", prompt="One, two,", temperature=0)
    assert text.choices[0].text


def test_the_official_client_gets_the_same_vectors_in_either_form(client: OpenAI) -> None:
    texts = ["The cat sits on the mat.", "A kitten is resting on a rug.", "Prices fell today."]
    asked = {"model": "smollm2", "input": texts}
    packed = client.embeddings.create(**asked)  # the client asks for base64 by itself
    floats = client.embeddings.create(**asked, encoding_format="float")
    assert [entry.index for entry in packed.data] == [0, 1, 2]
    for one, other in zip(packed.data, floats.data, strict=True):
        assert one.embedding == other.embedding
        assert sum(x * x for x in one.embedding) == pytest.approx(1, abs=1e-5)
    assert (packed.usage.prompt_tokens, packed.usage.total_tokens) == (20, 20)


def test_a_text_longer_than_the_context_is_a_400_that_names_the_input(client: OpenAI) -> None:
    with pytest.raises(APIStatusError, match="maximum context length is 8192") as caught:
        client.embeddings.create(model="smollm2", input=["short", "word " * 9000])
    assert (caught.value.status_code, caught.value.param) == (400, "input[1]")


def test_the_default_engine_answers_as_the_float32_reference_does(server: Tidegate) -> None:
    """At least 18 of 20 texts equal; where one differs, its two likeliest tokens were a near-tie."""
    with ThreadPoolExecutor(4) as pool:
        bodies = [
            {"model": "smollm2", "messages": c["messages"], "temperature": 0, "max_tokens": 64}
            for c in GOLDEN["cases"]
        ]
        answers = list(pool.map(lambda body: server.post("/v1/chat/completions", body), bodies))
    texts = [answer["choices"][0]["message"]["content"] for _, answer in answers]
    different = [c for c, text in zip(GOLDEN["cases"], texts, strict=True) if c["text"] != text]
    assert len(different) <= 2
    assert all(case["min_gap"] < 0.02 for case in different)


def test_32_streams_at_once_say_what_each_says_alone(server: Tidegate) -> None:
    bodies = [_chat(f"Count from {i} upwards.", max_tokens=4 + i) for i in range(32)]

    def text(body: dict[str, Any]) -> str:
        with server.stream("/v1/chat/completions", body) as events:
            chunks = [json.loads(data) for data in events if data != "[DONE]"]
        assert chunks[-1]["choices"][0]["finish_reason"] in ("stop", "length")
        return "".join(c["choices"][0]["delta"].get("content", "") for c in chunks)

    alone = [text(body) for body in bodies]
    with ThreadPoolExecutor(32) as pool:
        together = list(pool.map(text, bodies))
    assert together == alone
    wait_until(lambda: _engine_is_idle(server), what="an idle engine with all its blocks free")


def test_a_client_that_leaves_frees_its_row_and_is_counted_once(server: Tidegate) -> None:
    body = _chat("Tell a long story.", max_tokens=4000, ignore_eos=True, user="leaver")
    before = len(server.rows(outcome="cancelled"))
    with server.stream("/v1/chat/completions", body) as events:
        for _ in range(5):
            next(events)
    wait_until(lambda: _engine_is_idle(server), 5, "the row's end")
    rows = wait_until(lambda: server.rows(outcome="cancelled")[before:], what="the usage row")
    assert [(row["status"], row["principal"], row["model"]) for row in rows] == [
        (499, "web", "smollm2")
    ]
    assert rows[0]["usage"]["completion_tokens"] >= 3


def test_fallback_works_before_the_first_byte(client: OpenAI, peer: Upstream) -> None:
    peer.mode = "refuse"
    answer = client.chat.completions.create(**_chat("Say hi.", "remote-first", max_tokens=4))
    assert answer.model == "smollm2"
    chunks = list(
        client.chat.completions.create(
            **_chat("Say hi.", "remote-first", max_tokens=4), stream=True
        )
    )
    assert chunks[-1].choices[0].finish_reason


def test_fallback_never_comes_after_the_first_byte(server: Tidegate, peer: Upstream) -> None:
    peer.mode = "cut"
    with server.stream("/v1/chat/completions", _chat("Say hi.", "remote-first")) as events:
        data = list(events)
    *chunks, error = [json.loads(line) for line in data if line != "[DONE]"]
    text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks)
    assert text == "from upstream"
    assert error["error"]["message"]
    assert all(c["choices"][0]["finish_reason"] is None for c in chunks)


def test_a_prompt_longer_than_the_context_is_a_400_with_the_numbers(client: OpenAI) -> None:
    with pytest.raises(APIStatusError) as caught:
        client.chat.completions.create(**_chat("word " * 9000))
    assert caught.value.status_code == 400
    assert caught.value.code == "context_length_exceeded"
    assert "8192" in caught.value.message


def test_keys_are_checked_and_models_kept_apart(server: Tidegate) -> None:
    assert server.post("/v1/chat/completions", _chat("x"), key="sk-wrong")[0] == 401
    assert server.post("/v1/chat/completions", _chat("x"), key="sk-narrow")[0] == 404
    status, body = server.post("/v1/chat/completions", _chat("x", "remote"), key="sk-narrow")
    assert (status, body["choices"][0]["message"]["content"]) == (200, "from upstream")


def test_killing_the_engine_ends_its_streams_and_nothing_else(
    server: Tidegate, peer: Upstream
) -> None:
    peer.mode = "ok"
    body = _chat("Tell a long story.", max_tokens=4000, ignore_eos=True)
    with (
        server.stream("/v1/chat/completions", body) as first,
        server.stream("/v1/chat/completions", body) as second,
    ):
        next(first), next(second)
        server.kill("backend.worker")
        for events in (first, second):
            last = [data for data in events if data != "[DONE]"][-1]
            assert json.loads(last)["error"]["type"] == "server_error"
    assert server.ready()
    assert server.post("/v1/chat/completions", _chat("x", "remote"))[0] == 200
    status, answer = server.post("/v1/chat/completions", _chat("x", "local-first"))
    assert (status, answer["choices"][0]["message"]["content"]) == (200, "from upstream")
    wait_until(
        lambda: server.post("/v1/chat/completions", _chat("Hi", max_tokens=2))[0] == 200,
        20,
        "the engine's return",
    )


def test_killing_the_store_stops_no_answer_and_loses_no_row(
    server: Tidegate, peer: Upstream
) -> None:
    peer.mode = "ok"

    def ask() -> str:
        request = _chat("x", "remote")
        answer = urllib.request.Request(
            f"{server.url}/v1/chat/completions",
            json.dumps(request).encode(),
            {"content-type": "application/json", "authorization": "Bearer sk-test"},
        )
        with urllib.request.urlopen(answer, timeout=10) as reply:
            return str(reply.headers["x-request-id"])

    before = ask()
    wait_until(lambda: server.rows(request_id=before), what="the row before")
    server.kill("valkey-server")
    during = [ask() for _ in range(3)]
    for request_id in (before, *during):
        wait_until(lambda name=request_id: server.rows(request_id=name), 20, "the row")
        assert len(server.rows(request_id=request_id)) == 1


def test_every_request_of_this_module_left_exactly_one_row(server: Tidegate) -> None:
    ids = [row["request_id"] for row in server.rows()]
    assert len(ids) == len(set(ids)) > 3


def test_a_stop_while_a_stream_runs_lets_it_end(
    tmp_path: Path, demo_model_path: Path, peer: Upstream
) -> None:
    config = CONFIG.format(model=demo_model_path, upstream=peer.url)
    with serving(tmp_path, config) as server:
        body = _chat("Tell a story.", max_tokens=60, ignore_eos=True)
        with server.stream("/v1/chat/completions", body) as events:
            next(events)
            os.kill(server.process.pid, signal.SIGTERM)
            data = list(events)
    assert data[-1] == "[DONE]"
    assert json.loads(data[-2])["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--model", "no/such.gguf"], "no/such.gguf"),
        (["--model", "corrupt.gguf"], "corrupt.gguf"),
        (["--config", "bad.toml"], "bad.toml:2"),
    ],
)
def test_what_cannot_start_says_so_in_one_line(
    tmp_path: Path, words: list[str], expected: str
) -> None:
    (tmp_path / "corrupt.gguf").write_bytes(b"GGUF" + os.urandom(2000))
    (tmp_path / "bad.toml").write_text("[server]\nprot = 1\n")
    done = run_tidegate("serve", *words, cwd=tmp_path)
    assert done.returncode == 2
    assert expected in done.stderr
    assert "Traceback" not in done.stderr
    faults = [line for line in done.stderr.splitlines() if expected in line]
    assert len(faults) == 1
