"""config.toml -> Config: parsed, checked against every rule, secrets resolved, plugins loaded."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import structs

from gateway.config_checks import check_document
from gateway.config_faults import ConfigFaults, Faults
from gateway.config_lines import key_lines
from gateway.config_reader import Reader, as_table
from gateway.config_schema import (
    AuthConfig,
    BatchConfig,
    CacheConfig,
    Config,
    Document,
    KeyConfig,
    KeyDigest,
    ModelConfig,
    PluginsConfig,
    PriceConfig,
    QueueConfig,
    ServerConfig,
    SloConfig,
    StoreConfig,
    TelemetryConfig,
)

__all__ = [
    "AuthConfig",
    "BatchConfig",
    "CacheConfig",
    "Config",
    "ConfigFaults",
    "KeyConfig",
    "KeyDigest",
    "ModelConfig",
    "PluginsConfig",
    "PriceConfig",
    "QueueConfig",
    "ServerConfig",
    "SloConfig",
    "StoreConfig",
    "TelemetryConfig",
    "load_config",
    "parse_config",
    "read_text",
]

MAX_CONFIG_BYTES = 16 * 2**20
Overrides = Mapping[str, Mapping[str, Any]]
"""Values that replace the file's, by table and key: {"server": {"port": 8081}}."""


def load_config(path: Path, overrides: Overrides | None = None) -> Config:
    """Read and check a file. Raises ConfigFaults with one line for each fault."""
    return parse_config(read_text(path), path, overrides)


def read_text(path: Path) -> str:
    """Raises ConfigFaults."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_CONFIG_BYTES + 1)
    except OSError as exc:
        raise ConfigFaults([f"{file_label(path)}: {exc.strerror}"]) from exc
    if len(data) > MAX_CONFIG_BYTES:
        raise ConfigFaults([f"{file_label(path)}: is larger than {MAX_CONFIG_BYTES} bytes"])
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        line = data.count(b"\n", 0, exc.start) + 1
        raise ConfigFaults([f"{file_label(path)}:{line}: is not UTF-8 text"]) from exc


def parse_config(text: str, path: Path, overrides: Overrides | None = None) -> Config:
    """Check a text as if it stood in the file `path`, which need not exist. Raises ConfigFaults."""
    tables = _parse_toml(text, path)
    lines = key_lines(text)
    for table, values in (overrides or {}).items():
        own = as_table(tables.get(table, {}))
        tables[table] = tables[table] if own is None else {**own, **values}
        for key in values:
            lines.pop((table, key), None)
    faults = Faults(file_label(path), lines)
    base_dir = path.absolute().parent
    reader = Reader(faults, base_dir, os.environ)
    document = reader.struct(Document, tables, ())
    parts, providers = check_document(tables, reader, base_dir, faults)
    faults.raise_if_any()
    assert document is not None
    sections = {key: getattr(document, key) for key in Document.__struct_fields__}
    sections["providers"] = tuple(providers.values())
    sections["store"] = structs.replace(document.store, data_dir=base_dir / document.store.data_dir)
    return Config(path=path, parts=parts, **sections)


def file_label(path: Path) -> str:
    """How messages call the file: from here where it lies below the working directory."""
    try:
        return str(path.absolute().relative_to(Path.cwd()))
    except (ValueError, OSError):
        return str(path)


def _parse_toml(text: str, path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except RecursionError as exc:
        raise ConfigFaults([f"{file_label(path)}: is nested too deeply"]) from exc
    except ValueError as exc:  # TOMLDecodeError, and what int() says of numbers too long
        message = " ".join(str(exc).split())
        place = re.search(r"\(at line (\d+), column \d+\)", message)
        last = text.count("\n") + 1 if "(at end of document)" in message else 0
        line = f":{place[1] if place else last}" if place or last else ""
        raise ConfigFaults([f"{file_label(path)}{line}: not valid TOML: {message}"]) from exc
