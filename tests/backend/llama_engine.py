"""Engines over the tiny Llama, on either tier: real weights files, attention and tokenizer, in float32."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from backend.cpu import native
from backend.engine.config import EngineConfig
from backend.engine.engine import LLMEngine
from backend.models.loader import LoadedModel, load_model
from tests.backend import tiny_llama

TIERS = [
    "portable",
    pytest.param(
        "native",
        marks=pytest.mark.skipif(native.native_available() is not None, reason="no native tier"),
    ),
]


@cache
def loaded(tier: str = "portable", seed: int = 0) -> LoadedModel:
    """Engines may share a model: each has a KV cache of its own. Sets torch to one thread, see `one_thread`."""
    with TemporaryDirectory() as folder:
        path = tiny_llama.write_folder(Path(folder), tiny_llama.tensors(seed))
        return load_model(path, dtype="float32", native=tier == "native", threads=1)


def llama_engine(
    tier: str = "portable", *, draft_seed: int | None = None, **config: Any
) -> LLMEngine:
    """`draft_seed`: weights of a model that guesses; 0 is the model itself, which is always right."""
    draft = None if draft_seed is None else loaded(tier, draft_seed).model
    return LLMEngine(
        loaded(tier).model,
        loaded(tier).tokenizer,
        EngineConfig(**{"block_size": 16, "num_blocks": 64, **config}),
        draft_model=draft,
        clock=lambda: 0.0,
        entropy=iter(range(1, 10**6)).__next__,
    )
