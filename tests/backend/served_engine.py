"""The whole way of a request in one process: the gateway's application over ASGI, socket, worker server, engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
from starlette.applications import Starlette

from backend.launch import socket_path
from backend.options import EngineOptions, WorkerSettings
from backend.worker import _new_server, load_engine
from backend.worker_server import WorkerServer
from gateway.app import create_app
from gateway.config import parse_config
from plugins.interfaces import Runtime
from tests.asgi_client import Answer, call
from tests.backend import tiny_llama

CONFIG = """
[auth]
mode = "open"
[store]
data_dir = "data"
[[providers]]
name = "local"
type = "engine"
path = "model"
[[models]]
name = "m"
targets = ["local/m"]
"""


@dataclass
class Served:
    app: Starlette
    worker: WorkerServer

    async def chat(self, **fields: Any) -> Answer:
        return await self.post("/v1/chat/completions", HI | fields)

    async def complete(self, **fields: Any) -> Answer:
        return await self.post("/v1/completions", {"model": "m", "prompt": "hello"} | fields)

    async def post(self, path: str, body: Any) -> Answer:
        with anyio.fail_after(60):
            return await call(self.app, path, body)

    async def wait_idle(self) -> None:
        """Every block is free again, and nothing is kept of what was asked."""
        with anyio.fail_after(30):
            while self.worker._stats.num_running or self.worker._choices:
                await anyio.sleep(0.005)
        assert self.worker._stats.num_free_blocks == self.worker._stats.num_blocks


HI = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 6}


@asynccontextmanager
async def served(folder: Path, **options: Any) -> AsyncGenerator[Served, None]:
    """The tiny Llama, 128 tokens of context, behind `type = "engine"`; `options` are those of its table."""
    tiny_llama.write_folder(folder / "model", tiny_llama.tensors())
    runtime = Runtime(folder, folder)
    socket = socket_path("local", runtime, 0)
    table = EngineOptions(**{"dtype": "float32", "num_blocks": 64, **options})
    settings = WorkerSettings("local/0", str(socket), str(folder / "model"), "", options=table)
    worker = _new_server(load_engine(settings))
    listener = await asyncio.get_running_loop().create_unix_server(worker.new_session, socket)
    worker.engine_thread.start()
    app = create_app(parse_config(CONFIG, folder / "config.toml"), runtime, f"unix://{folder}/no")
    async with app.router.lifespan_context(app):
        provider = app.state.gateway.providers["local"][1]
        with anyio.fail_after(30):
            while not provider.ready():
                await anyio.sleep(0.005)
        yield Served(app, worker)
    listener.close()
    worker.close()
    worker.engine_thread.join(10)
