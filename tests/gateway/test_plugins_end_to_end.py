"""A plugin file that is named in config.toml, at work on every endpoint, whole and streamed."""

from __future__ import annotations

import json
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette

from cache.embedded import EmbeddedStore
from tests.asgi_client import Answer, call
from tests.gateway.test_app import CONFIG, running

pytestmark = pytest.mark.anyio
PLUGIN = Path(__file__).resolve().parents[1] / "outside/case_plugin.py"
KEY = {"authorization": "Bearer sk-test"}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
ENDPOINTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT),
    ("/v1/completions", {"model": "m", "prompt": "hi"}),
]


def _app(folder: Path, store_url: str, **table: Any) -> AbstractAsyncContextManager[Starlette]:
    rows = table | {"calls_file": str(folder / "calls.json")}
    lines = [f"{key} = {json.dumps(value)}" for key, value in rows.items()]
    config = CONFIG.replace('["scripted.py"]', json.dumps(["scripted.py", str(PLUGIN)]))
    config += "\n[plugins.case_plugin]\n" + "\n".join(lines)
    return running(folder, store_url, config)


def _text(reply: Answer, stream: bool) -> str:
    if not stream:
        choice = reply.json()["choices"][0]
        return str(choice.get("text") or choice["message"]["content"])
    events = [e[6:] for e in reply.body.decode().split("\n\n") if e.startswith("data: {")]
    choices = [c for event in events for c in json.loads(event)["choices"]]
    return "".join(c.get("text") or c.get("delta", {}).get("content") or "" for c in choices)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), ENDPOINTS)
async def test_a_transform_runs_once_on_every_endpoint(
    tmp_path: Path, store_server: EmbeddedStore, path: str, body: dict[str, Any], stream: bool
) -> None:
    async with _app(tmp_path, store_server.url, after_response="append '!' to content") as app:
        reply = await call(app, path, body | {"stream": stream}, headers=KEY)
    assert _text(reply, stream) == "hi!"
    assert json.loads((tmp_path / "calls.json").read_text()) == {"after_response": 1}


@pytest.mark.parametrize(("path", "body"), ENDPOINTS)
async def test_a_filter_refuses_before_the_provider_is_asked(
    tmp_path: Path, store_server: EmbeddedStore, path: str, body: dict[str, Any]
) -> None:
    hidden = json.loads(json.dumps(body).replace('"hi"', '"forbidden"'))
    async with _app(
        tmp_path, store_server.url, before_request="refuse when content has 'forbidden'"
    ) as app:
        reply = await call(app, path, hidden, headers=KEY)
        assert reply.status == 400
        assert (await call(app, path, body, headers=KEY)).status == 200


@pytest.mark.parametrize(("on_error", "status"), [("block", 500), ("allow", 200)])
async def test_a_broken_filter_does_what_its_on_error_says(
    tmp_path: Path, store_server: EmbeddedStore, on_error: str, status: int
) -> None:
    async with _app(tmp_path, store_server.url, before_request="raise", on_error=on_error) as app:
        reply = await call(app, "/v1/chat/completions", CHAT, headers=KEY)
    assert reply.status == status
    assert b"Traceback" not in reply.body


async def test_a_hook_that_sleeps_is_cut_at_its_limit(
    tmp_path: Path, store_server: EmbeddedStore
) -> None:
    async with _app(tmp_path, store_server.url, before_request="sleep 30 s", timeout_s=0.05) as app:
        reply = await call(app, "/v1/chat/completions", CHAT, headers=KEY)
    assert reply.json()["error"]["code"] == "plugin_failed"
