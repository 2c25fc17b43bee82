"""The tables of config.toml as frozen structs: every key, its type, range and default, each written once.

`auth.keys` hold digests instead of keys, other secrets are handles that print as ***.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from plugins.interfaces import Breaker, Limits, ProviderSettings, Timeout
from plugins.manager import Parts
from plugins.secrets import Secret

Name = Annotated[str, Meta(min_length=1, max_length=200)]
Count = Annotated[int, Meta(ge=0)]
AtLeastOne = Annotated[int, Meta(ge=1)]
Positive = Annotated[float, Meta(gt=0)]


class KeyDigest(Struct, frozen=True):
    """A client key as its SHA-256: the key itself is not kept."""

    sha256: bytes

    def __repr__(self) -> str:
        return "***"


class ServerConfig(Struct, frozen=True):
    host: Name = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 8080  # 0: any free one
    workers: Annotated[int, Meta(ge=1, le=256)] = 1
    max_body_mb: AtLeastOne = 32
    shutdown_grace_s: Annotated[float, Meta(ge=0)] = 30
    cors_origins: tuple[str, ...] = ()


class KeyConfig(Struct, frozen=True):
    name: Name
    key: KeyDigest
    models: Annotated[tuple[str, ...], Meta(min_length=1)] = ("*",)
    limits: Limits = Limits()


class AuthConfig(Struct, frozen=True):
    mode: Literal["keys", "open"] = "keys"
    admin_key: Secret | None = None
    keys: tuple[KeyConfig, ...] = ()


class StoreConfig(Struct, frozen=True):
    url: str = ""
    data_dir: Path = Path("data")
    timeout_ms: Positive = 100
    on_limits_failure: Literal["local", "open", "closed"] = "local"


class SloConfig(Struct, frozen=True):
    ttft_ms: Positive | None = None
    tpot_ms: Positive | None = None
    percentile: Annotated[float, Meta(gt=0, le=100)] = 95


class CacheConfig(Struct, frozen=True):
    mode: Literal["off", "exact"] = "off"
    ttl_s: AtLeastOne = 3600
    scope: Literal["key", "shared"] = "key"


class ModelConfig(Struct, frozen=True):
    name: Name
    targets: Annotated[tuple[str, ...], Meta(min_length=1)]
    policy: Literal["ordered", "slo", "cheapest", "fastest"] = "ordered"
    slo: SloConfig = SloConfig()
    cache: CacheConfig = CacheConfig()


class PriceConfig(Struct, frozen=True):
    """US dollars for a million tokens; None = as `input`."""

    target: Name
    input: Annotated[float, Meta(ge=0)]
    output: Annotated[float, Meta(ge=0)]
    cached_input: Annotated[float, Meta(ge=0)] | None = None
    cache_write: Annotated[float, Meta(ge=0)] | None = None


class PluginRulesConfig(Struct, frozen=True):
    """Tidegate's own two keys of a plugin's table."""

    on_error: Literal["block", "allow"] = "block"
    timeout_s: Positive = 5


class PluginsConfig(Struct, frozen=True):
    """`tables` holds each plugin's own table by name, as it is."""

    enabled: tuple[str, ...] = ()
    tables: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])


class QueueConfig(Struct, frozen=True):
    max_waiting: Count = 1000
    max_wait_s: Positive = 30


class BatchConfig(Struct, frozen=True):
    max_file_mb: AtLeastOne = 200
    max_lines: AtLeastOne = 50000
    max_parallel: AtLeastOne = 16
    retention_days: AtLeastOne = 30


class TelemetryConfig(Struct, frozen=True):
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["json", "text"] = "json"
    log_content: bool = False
    metrics: bool = True
    otlp_endpoint: str = ""


class Document(Struct, frozen=True):
    """The whole file, table by table."""

    server: ServerConfig = ServerConfig()
    auth: AuthConfig = AuthConfig()
    store: StoreConfig = StoreConfig()
    providers: tuple[ProviderSettings, ...] = ()
    models: tuple[ModelConfig, ...] = ()
    prices: tuple[PriceConfig, ...] = ()
    plugins: PluginsConfig = PluginsConfig()
    queue: QueueConfig = QueueConfig()
    batch: BatchConfig = BatchConfig()
    telemetry: TelemetryConfig = TelemetryConfig()


@dataclass(frozen=True)
class Config:
    """A checked configuration: the file's tables, where it was, and the parts that its plugins handed over."""

    path: Path
    server: ServerConfig
    auth: AuthConfig
    store: StoreConfig
    providers: tuple[ProviderSettings, ...]
    models: tuple[ModelConfig, ...]
    prices: tuple[PriceConfig, ...]
    plugins: PluginsConfig
    queue: QueueConfig
    batch: BatchConfig
    telemetry: TelemetryConfig
    parts: Parts


# Ranges of the structs that plugins/interfaces.py shares with plugin authors.
RANGES: Mapping[tuple[type, str], Any] = {
    (ProviderSettings, "name"): Name,
    (ProviderSettings, "type"): Name,
    (ProviderSettings, "max_retries"): Annotated[int, Meta(ge=0, le=10)],
    (ProviderSettings, "max_parallel"): Count,
    **{(Timeout, key): Positive for key in Timeout.__struct_fields__},
    (Breaker, "failures"): Count,
    (Breaker, "open_s"): Positive,
    **{(Limits, key): AtLeastOne for key in ("rpm", "tpm", "max_parallel", "max_tokens_total")},
    (Limits, "budget_usd"): Positive,
    (Limits, "budget_window"): Literal["day", "month", "never"],
}
