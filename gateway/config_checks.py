"""What no single table can tell: names given twice, targets without provider, types and plugins that are not there."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from gateway.config_faults import At, Faults, nearest
from gateway.config_providers import ProviderChecks
from gateway.config_reader import Reader, as_list, as_table
from gateway.config_schema import (
    KeyConfig,
    ModelConfig,
    PluginsConfig,
    PriceConfig,
    ServerConfig,
    StoreConfig,
)
from gateway.config_unbuilt import check_unbuilt
from plugins.interfaces import ProviderSettings
from plugins.manager import Parts, PluginFault, collect_parts


def check_document(
    tables: Mapping[str, Any], reader: Reader, base_dir: Path, faults: Faults
) -> tuple[Parts, dict[At, ProviderSettings]]:
    """Note all faults between tables. Returns what plugins brought, and each provider as it will be used."""
    _check_server(tables, reader, faults)
    _check_names(reader, faults)
    models = _names(tables, "models")
    if not models and not faults.touch(("models",)):
        faults.add(("models",), "at least one model is needed: add [[models]]")
    check_unbuilt(reader, faults)
    _check_keys(reader, models, faults)
    _check_models(reader, _names(tables, "providers"), faults)
    parts = _collect(reader, base_dir, faults)
    if parts is None:
        return Parts(), {}
    checks = ProviderChecks(parts.provider_types, base_dir, faults)
    providers = {
        at: checks.complete(settings, _row(tables, at), at)
        for at, settings in reader.rows(ProviderSettings)
    }
    return parts, providers


def _names(tables: Mapping[str, Any], table: str) -> frozenset[str]:
    """All names in a list of tables, also of those with a fault elsewhere, so that no fault brings others along."""
    rows = [as_table(row) for row in as_list(tables.get(table)) or ()]
    names = [row.get("name") for row in rows if row is not None]
    return frozenset(name for name in names if isinstance(name, str))


def _row(tables: Mapping[str, Any], at: At) -> Mapping[str, Any]:
    table, index = at
    return tables[str(table)][index]


def _check_server(tables: Mapping[str, Any], reader: Reader, faults: Faults) -> None:
    server = next((found for _, found in reader.rows(ServerConfig)), ServerConfig())
    auth = as_table(tables.get("auth", {}))
    mode = None if auth is None else auth.get("mode", "keys")
    if mode == "open" and not is_loopback(server.host):
        faults.add(
            ("auth", "mode"),
            f'"open" is for a loopback host only, but server.host is "{server.host}", which others'
            ' reach; use mode = "keys"',
        )
    if auth is not None and mode == "keys" and not auth.get("keys"):
        faults.add(("auth", "keys"), 'mode is "keys", but there is no key: add [[auth.keys]]')
    for index, origin in enumerate(server.cors_origins):
        if origin != "*" and urlsplit(origin).scheme not in ("http", "https"):
            message = 'must be "*" or an origin such as "https://example.com"'
            faults.add(("server", "cors_origins", index), message)
    for at, store in reader.rows(StoreConfig):
        if store.url and urlsplit(store.url).scheme not in ("redis", "rediss", "unix"):
            faults.add((*at, "url"), "must begin with redis://, rediss:// or unix://")


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _check_unique(rows: Iterable[tuple[At, Any]], what: str, faults: Faults) -> None:
    """`rows`: where each value stands. The second of two equal ones is the fault."""
    seen: set[Any] = set()
    for at, value in rows:
        if value in seen:
            faults.add(at, what.format(value=value))
        seen.add(value)


def _check_names(reader: Reader, faults: Faults) -> None:
    for cls in (ProviderSettings, ModelConfig, KeyConfig):
        named = [((*at, "name"), row.name) for at, row in reader.rows(cls)]
        _check_unique(named, '"{value}" is given twice', faults)
    digests = [((*at, "key"), row.key) for at, row in reader.rows(KeyConfig)]
    _check_unique(digests, "is the key of another entry too", faults)
    prices = [((*at, "target"), row.target) for at, row in reader.rows(PriceConfig)]
    _check_unique(prices, '"{value}" is given twice', faults)


def _check_keys(reader: Reader, models: frozenset[str], faults: Faults) -> None:
    for at, key in reader.rows(KeyConfig):
        for i, model in enumerate(key.models):
            if model != "*" and model not in models:
                faults.add((*at, "models", i), f'no model "{model}"{nearest(model, models)}')


def _check_models(reader: Reader, providers: frozenset[str], faults: Faults) -> None:
    for at, model in reader.rows(ModelConfig):
        places: list[At] = [(*at, "targets", i) for i in range(len(model.targets))]
        for place, target in zip(places, model.targets, strict=True):
            _check_target(target, providers, place, faults)
        _check_unique(zip(places, model.targets, strict=True), '"{value}" is given twice', faults)
        if model.policy == "slo" and model.slo.ttft_ms is None and model.slo.tpot_ms is None:
            faults.add((*at, "slo"), 'policy = "slo" needs ttft_ms, tpot_ms or both')


def _check_target(target: str, providers: frozenset[str], at: At, faults: Faults) -> None:
    provider, slash, upstream_model = target.partition("/")
    if not (provider and slash and upstream_model):
        faults.add(at, f'must be "provider/upstream model name", got "{target}"')
    elif provider not in providers:
        faults.add(at, f'no provider "{provider}"{nearest(provider, providers)}')


def _collect(reader: Reader, base_dir: Path, faults: Faults) -> Parts | None:
    """Import the plugins. Only with their parts is it known which provider types there are."""
    plugins = next((found for _, found in reader.rows(PluginsConfig)), PluginsConfig())
    if faults.touch(("plugins",)):
        return None
    try:
        return collect_parts(list(plugins.enabled), plugins.tables, base_dir)
    except PluginFault as exc:
        faults.add(("plugins", "enabled"), str(exc))
        return None
