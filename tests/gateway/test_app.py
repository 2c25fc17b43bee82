"""The whole application of one gateway process, over ASGI, in front of a provider that a plugin file brings."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from starlette.applications import Starlette

from cache.embedded import EmbeddedStore
from gateway.app import create_app
from gateway.config import parse_config
from plugins.interfaces import Runtime
from tests.asgi_client import Answer, call

pytestmark = pytest.mark.anyio
PLUGIN = """
from plugins.hookspecs import hookimpl
from plugins.testing import ScriptedProvider, answer

class Kind:
    name = "scripted"
    default_base_url = ""
    def check(self, settings): return []
    def prepare(self, settings, runtime): pass
    def processes(self, settings, runtime): return []
    def build(self, settings, runtime): return ScriptedProvider(settings.name, [answer("hi")])

@hookimpl
def register_provider_types(register):
    register(Kind())
"""
CONFIG = """
[server]
cors_origins = ["https://app.example"]
[[auth.keys]]
name = "web"
key = "sk-test"
[[auth.keys]]
name = "narrow"
key = "sk-narrow"
models = ["a/b"]
[store]
data_dir = "data"
[[providers]]
name = "s"
type = "scripted"
[[models]]
name = "m"
targets = ["s/x"]
[[models]]
name = "a/b"
targets = ["s/y"]
[plugins]
enabled = ["scripted.py"]
"""
KEY = {"authorization": "Bearer sk-test"}
BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


@asynccontextmanager
async def running(
    folder: Path, store_url: str, text: str = CONFIG
) -> AsyncGenerator[Starlette, None]:
    (folder / "scripted.py").write_text(PLUGIN)
    config = parse_config(text, folder / "config.toml")
    app = create_app(config, Runtime(folder, folder), store_url)
    async with app.router.lifespan_context(app):
        yield app


@pytest.fixture
async def app(tmp_path: Path, store_server: EmbeddedStore) -> AsyncIterator[Starlette]:
    async with running(tmp_path, store_server.url) as app:
        yield app


async def get(app: Starlette, path: str, **headers: str) -> Answer:
    return await call(app, path, method="GET", headers=KEY | headers)


async def test_chat_answers_without_a_store(tmp_path: Path) -> None:
    async with running(tmp_path, f"unix://{tmp_path}/nobody-listens") as app:
        reply = await call(app, "/v1/chat/completions", BODY, headers=KEY)
    assert reply.json()["choices"][0]["message"]["content"] == "hi"


async def test_chat_answers(app: Starlette) -> None:
    reply = await call(app, "/v1/chat/completions", BODY, headers=KEY)
    assert reply.json()["choices"][0]["message"]["content"] == "hi"


@pytest.mark.parametrize("path", ["/chat/completions", "//v1/chat/completions/"])
async def test_other_spellings_of_a_path_are_served_without_a_redirect(
    app: Starlette, path: str
) -> None:
    assert (await call(app, path, BODY, headers=KEY)).status == 200


async def test_models_are_those_of_the_key_and_ids_may_hold_slashes(app: Starlette) -> None:
    listed = await get(app, "/v1/models")
    assert [m["id"] for m in listed.json()["data"]] == ["m", "a/b"]
    narrow = await get(app, "/v1/models", authorization="Bearer sk-narrow")
    assert [m["id"] for m in narrow.json()["data"]] == ["a/b"]
    assert (await get(app, "/v1/models/a/b")).json()["id"] == "a/b"
    assert (await get(app, "/v1/models/zzz")).json()["error"]["code"] == "model_not_found"
    assert (await get(app, "/v1/models", authorization="Bearer no")).status == 401


@pytest.mark.parametrize(("path", "status"), [("/v1/nothing", 404), ("/", 404)])
async def test_unknown_paths_are_404_in_the_envelope(
    app: Starlette, path: str, status: int
) -> None:
    reply = await call(app, path, BODY, headers=KEY)
    assert reply.status == status
    assert set(reply.json()["error"]) == {"message", "type", "param", "code"}


async def test_a_wrong_method_is_405_in_the_envelope(app: Starlette) -> None:
    assert (await call(app, "/v1/models", BODY, headers=KEY)).status == 405
    assert (await get(app, "/v1/chat/completions")).status == 405


async def test_health_asks_for_no_key_and_follows_draining(app: Starlette) -> None:
    assert (await call(app, "/livez", method="GET")).status == 200
    assert (await call(app, "/readyz", method="GET")).status == 200
    app.state.gateway.readiness.draining = True
    assert (await call(app, "/readyz", method="GET")).status == 503
    assert (await call(app, "/livez", method="GET")).status == 200


async def test_an_allowed_origin_gets_its_preflight_without_a_key(app: Starlette) -> None:
    headers = {
        "origin": "https://app.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,x-stainless-lang",
    }
    reply = await call(app, "/v1/chat/completions", method="OPTIONS", headers=headers)
    assert reply.status == 200
    assert reply.headers["access-control-allow-origin"] == "https://app.example"


async def test_a_reload_takes_over_keys_and_models(app: Starlette, tmp_path: Path) -> None:
    text = CONFIG.replace('key = "sk-test"', 'key = "sk-new"').replace('name = "m"', 'name = "n"')
    app.state.gateway.reload(parse_config(text, tmp_path / "config.toml"))
    assert (await call(app, "/v1/chat/completions", BODY, headers=KEY)).status == 401
    new = {"authorization": "Bearer sk-new"}
    assert (await call(app, "/v1/chat/completions", BODY, headers=new)).status == 404
    body = BODY | {"model": "n"}
    assert (await call(app, "/v1/chat/completions", body, headers=new)).status == 200


async def test_metrics_count_what_was_asked(app: Starlette) -> None:
    await call(app, "/v1/chat/completions", BODY, headers=KEY)
    text = (await call(app, "/metrics", method="GET")).body.decode()
    assert 'tidegate_requests_total{dialect="chat",model="m",outcome="ok",status="200"} 1.0' in text
