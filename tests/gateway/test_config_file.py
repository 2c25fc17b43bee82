"""The commented config.toml at the top level: what it says is what the code does."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.config import load_config
from gateway.config_schema import (
    AuthConfig,
    BatchConfig,
    Document,
    KeyConfig,
    ModelConfig,
    PluginRulesConfig,
    PluginsConfig,
    PriceConfig,
    QueueConfig,
    ServerConfig,
    StoreConfig,
    TelemetryConfig,
)
from plugins.interfaces import ProviderSettings

FILE = Path(__file__).parents[2] / "config.toml"
TABLES: dict[str, type] = {
    "server": ServerConfig,
    "auth": AuthConfig,
    "auth.keys": KeyConfig,
    "store": StoreConfig,
    "providers": ProviderSettings,
    "models": ModelConfig,
    "prices": PriceConfig,
    "plugins": PluginsConfig,
    "plugins.redact": PluginRulesConfig,
    "queue": QueueConfig,
    "batch": BatchConfig,
    "telemetry": TelemetryConfig,
}
HEADER = re.compile(r"(?:#\s+)?\[\[?([a-z_.]+)\]\]?")
DEFAULT = re.compile(r"#([a-z_]+ = .*)")
ANY_KEY = re.compile(r"(?:#\s*)?([a-z_]+) = ")


def shown_defaults() -> list[tuple[str, str, Any]]:
    """(table, key, value) of each line `#key = value`."""
    found: list[tuple[str, str, Any]] = []
    table = ""
    for line in FILE.read_text().splitlines():
        if header := HEADER.match(line):
            table = header[1]
        elif default := DEFAULT.match(line):
            [(key, value)] = tomllib.loads(default[1]).items()
            found.append((table, key, value))
    return found


def default_of(cls: type, key: str) -> Any:
    if dataclasses.is_dataclass(cls):
        field: Any = next(f for f in dataclasses.fields(cls) if f.name == key)
        factory = field.default_factory
        return field.default if factory is dataclasses.MISSING else factory()
    field = next(f for f in msgspec.structs.fields(cls) if f.name == key)
    return field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()


def plain(value: Any) -> Any:
    """As TOML would show it: what stands at its default None is left out."""
    if isinstance(value, msgspec.Struct):
        defaults = {key: plain(item) for key, item in msgspec.structs.asdict(value).items()}
        return {key: item for key, item in defaults.items() if item is not None}
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


@pytest.mark.parametrize(("table", "key", "shown"), shown_defaults())
def test_each_default_in_a_comment_is_that_of_the_code(table: str, key: str, shown: Any) -> None:
    real = plain(default_of(TABLES[table], key))
    if shown == {}:  # "nothing set", for the tables whose keys have defaults of their own
        assert real in ({}, plain(default_of(TABLES[table], key)))
    else:
        assert shown == real


def test_every_key_of_every_table_is_shown() -> None:
    shown: dict[str, set[str]] = {table: set() for table in TABLES}
    table = ""
    for line in FILE.read_text().splitlines():
        if header := HEADER.match(line):
            table = header[1]
        elif key := ANY_KEY.match(line):
            shown[table].add(key[1])
    for table, cls in TABLES.items():
        fields = (
            dataclasses.fields(cls)
            if dataclasses.is_dataclass(cls)
            else msgspec.structs.fields(cls)
        )
        assert {field.name for field in fields} - shown[table] <= {"keys", "tables"}, table


def test_every_table_has_a_place_in_the_test() -> None:
    assert {name.split(".")[0] for name in TABLES} == set(Document.__struct_fields__)


def test_the_file_serves_the_demo_model_to_this_machine_only() -> None:
    config = load_config(FILE)
    assert (config.server.host, config.server.port, config.auth.mode) == ("127.0.0.1", 8080, "open")
    assert [model.name for model in config.models] == ["smollm2"]
    assert config.providers[0].path == "demo"
    assert config.store.data_dir == FILE.parent / "data"
