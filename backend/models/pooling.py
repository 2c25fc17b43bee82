"""How a model made for embeddings says that its hidden states become one vector.

Sentence-transformers folders have it in `1_Pooling/config.json`, GGUF files in `<architecture>.pooling_type`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from backend.models.checkpoint import read_json
from backend.models.gguf import GGUFFile

Pooling = Literal["mean", "last"]
_MODES: dict[str, Pooling] = {"pooling_mode_mean_tokens": "mean", "pooling_mode_lasttoken": "last"}
_GGUF_TYPES: dict[int, Pooling] = {1: "mean", 3: "last"}
_GGUF_NAMES = ("none", "mean", "cls", "last", "rank")
logger = logging.getLogger(__name__)


def stated_pooling(path: Path) -> Pooling | None:
    """None: the model says nothing, or asks for what causal models cannot do, and a line in the log says so.

    Raises:
        ModelLoadError: a file is damaged.
    """
    if path.is_dir() and (path / "config.json").exists():
        config = path / "1_Pooling" / "config.json"
        return _of_folder(read_json(config)) if config.exists() else None
    file = path if path.is_file() else next(path.glob("*.gguf"))
    return _of_gguf(GGUFFile(file).metadata)


def _of_folder(config: Mapping[str, Any]) -> Pooling | None:
    asked = [name for name, value in config.items() if name.startswith("pooling_mode") and value]
    if len(asked) == 1 and asked[0] in _MODES:
        return _MODES[asked[0]]
    if asked:
        _warn(", ".join(asked))
    return None


def _of_gguf(metadata: Mapping[str, Any]) -> Pooling | None:
    kind = metadata.get(f"{metadata.get('general.architecture')}.pooling_type")
    if not isinstance(kind, int) or kind == 0:
        return None
    if kind not in _GGUF_TYPES:
        _warn(_GGUF_NAMES[kind] if kind in range(len(_GGUF_NAMES)) else str(kind))
    return _GGUF_TYPES.get(kind)


def _warn(asked: str) -> None:
    logger.warning("the model asks for pooling %s, which is not there: embeddings are means", asked)
