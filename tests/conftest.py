"""Fixtures shared by all tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from backend.models.demo import fetch_demo_model

DATA_DIR = Path(__file__).resolve().parent.parent / "data"


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def demo_model_path() -> Path:
    """The demo model of this checkout's data directory, fetched the first time."""
    return fetch_demo_model(DATA_DIR)
