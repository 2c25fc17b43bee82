"""Fixtures shared by all tests."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import settings

from backend.models.demo import fetch_demo_model
from cache.embedded import EmbeddedStore
from cache.store import Store

settings.register_profile("tidegate", deadline=None)  # how long an example takes says nothing here
settings.load_profile("tidegate")
DATA_DIR = Path(__file__).resolve().parent.parent / "data"


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def demo_model_path() -> Path:
    """The demo model of this checkout's data directory, fetched the first time."""
    return fetch_demo_model(DATA_DIR)


@pytest.fixture(scope="module")
async def store_server() -> AsyncIterator[EmbeddedStore]:
    """A real server of the store's protocol, in a folder whose name is short enough for sockets."""
    base = Path(tempfile.mkdtemp(prefix="tg"))
    server = EmbeddedStore(base / "data", base / "run")
    await server.start()
    yield server
    await server.stop()
    shutil.rmtree(base)


@pytest.fixture
async def store(store_server: EmbeddedStore) -> AsyncIterator[Store]:
    """A patient client of an empty store."""
    store = Store(store_server.url, timeout_ms=10_000)
    await store.call("FLUSHALL")
    yield store
    await store.aclose()
