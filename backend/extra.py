"""The optional part of an installation that the engine needs. No torch here: this says when it is missing."""

from __future__ import annotations

import importlib.util

_MODULES = ("torch", "numpy", "gguf", "tokenizers", "safetensors", "jinja2", "llguidance")


def missing_extra() -> str | None:
    """ "needs the backend extra: ...", or None when everything is there."""
    missing = [name for name in _MODULES if importlib.util.find_spec(name) is None]
    if not missing:
        return None
    return f"needs the backend extra: pip install 'tidegate[backend]' ({missing[0]} is missing)"
