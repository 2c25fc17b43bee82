"""What people call a model, and where its files are."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from backend.models.demo import fetch_demo_model
from backend.models.errors import ModelLoadError
from backend.models.hub import PREFIX, fetch_hub_model

DEMO = "demo"
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def locate_model(
    name: str, data_dir: Path, report: Callable[[int, int | None], None] | None = None
) -> Path:
    """A folder or .gguf file, "demo", or "hub:owner/name" ("owner/name" where no such path is); fetched if need be.

    `report(done, total)` is told the bytes of a fetch of the demo model. Raises ModelLoadError.
    """
    if name == DEMO:
        return fetch_demo_model(data_dir, report)
    if name.startswith(PREFIX):
        return fetch_hub_model(name)
    if Path(name).exists():
        return Path(name)
    if _HUB_NAME.fullmatch(name) and not name.endswith(".gguf"):
        return fetch_hub_model(name)
    raise ModelLoadError(f"{name}: no such file or folder")
