"""Engines over tiny models of the real architectures, with weights from files, in float32 on either tier."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from backend.cpu import native
from backend.engine.config import EngineConfig
from backend.engine.detokenizer import EngineTokenizer
from backend.engine.engine import LLMEngine
from backend.models.batch import Model
from backend.models.llama import Llama
from backend.models.loader import LoadedModel, load_model
from tests.backend import tiny_families, tiny_llama

HAS_NATIVE = native.native_available() is None
TIERS = [
    "portable",
    pytest.param("native", marks=pytest.mark.skipif(not HAS_NATIVE, reason="no native tier")),
]


class AsciiTokenizer:
    """For the 96 tokens of the tiny families: the end of the turn and each printable character of ASCII."""

    vocab_size = 96
    eos_ids = frozenset({0})
    bos_id = None

    def encode(
        self, text: str, *, add_special: bool = False, parse_special: bool = True
    ) -> list[int]:
        return [ord(char) - 31 for char in text]

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id + 31]) if token_id else b""

    def is_special(self, token_id: int) -> bool:
        return token_id == 0

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode() or "<end>"


@cache
def loaded(
    tier: str = "portable", seed: int = 0, quantization: str = "auto", kv_cache_dtype: str = "auto"
) -> LoadedModel:
    """The tiny Llama. Engines may share it: each has its own KV cache. Sets torch to one thread, see `one_thread`."""
    with TemporaryDirectory() as folder:
        path = tiny_llama.write_folder(Path(folder), tiny_llama.tensors(seed))
        options = {"dtype": "float32", "quantization": quantization, "threads": 1}
        options["kv_cache_dtype"] = kv_cache_dtype
        return load_model(path, native=tier == "native", **options)  # pyright: ignore[reportArgumentType]


@cache
def family(name: str) -> Llama:
    return tiny_families.model(name)


def llama_engine(
    tier: str = "portable",
    *,
    draft_seed: int | None = None,
    quantization: str = "auto",
    kv_cache_dtype: str = "auto",
    **config: Any,
) -> LLMEngine:
    """`draft_seed`: weights of a model that guesses; 0 is the model itself, which is always right."""
    forms = {"kv_cache_dtype": kv_cache_dtype}
    draft = None if draft_seed is None else loaded(tier, draft_seed, **forms).model
    model = loaded(tier, quantization=quantization, **forms)
    return _engine(model.model, model.tokenizer, draft, config)


def family_engine(name: str, *, own_draft: bool = False, **config: Any) -> LLMEngine:
    """One of `tiny_families`, on the portable tier. `own_draft`: it guesses for itself, and is always right."""
    return _engine(family(name), AsciiTokenizer(), family(name) if own_draft else None, config)


def _engine(
    model: Model, tokenizer: EngineTokenizer, draft: Model | None, config: dict[str, Any]
) -> LLMEngine:
    return LLMEngine(
        model,
        tokenizer,
        EngineConfig(**{"block_size": 16, "num_blocks": 64, **config}),
        draft_model=draft,
        clock=lambda: 0.0,
        entropy=iter(range(1, 10**6)).__next__,
    )
