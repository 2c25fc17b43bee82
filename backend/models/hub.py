"""`hub:owner/name`: a model folder from the Hugging Face hub, kept in its own cache."""

from __future__ import annotations

import re
from pathlib import Path

from backend.models.errors import ModelLoadError

PREFIX = "hub:"
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_WEIGHTS_AND_SETTINGS = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja"]


def fetch_hub_model(name: str) -> Path:
    """Download (or find in the cache) what is needed to serve `hub:owner/name`; returns its folder.

    Takes safetensors with their settings, or, where a repository holds none, its .gguf file. Without a network a
    complete copy in the cache still serves.

    Raises:
        ModelLoadError: a malformed name, an unknown or gated repository, or no network and no copy.
    """
    repo = name.removeprefix(PREFIX)
    if not _NAME.fullmatch(repo):
        raise ModelLoadError(f"{PREFIX}{repo}: a hub model is written {PREFIX}owner/name")
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        folder = Path(huggingface_hub.snapshot_download(repo, allow_patterns=_WEIGHTS_AND_SETTINGS))
        if not any(folder.glob("*.safetensors")):
            folder = Path(huggingface_hub.snapshot_download(repo, allow_patterns=["*.gguf"]))
    except LocalEntryNotFoundError as exc:
        raise ModelLoadError(
            f"{PREFIX}{repo}: the hub cannot be reached and there is no copy in its cache; give a path instead"
        ) from exc
    except HfHubHTTPError as exc:
        raise ModelLoadError(f"{PREFIX}{repo}: {_first_line(exc)}") from exc
    except (OSError, ValueError) as exc:
        raise ModelLoadError(f"{PREFIX}{repo}: cannot be downloaded ({_first_line(exc)})") from exc
    return folder


def _first_line(exc: Exception) -> str:
    return str(exc).strip().partition("\n")[0] or type(exc).__name__
