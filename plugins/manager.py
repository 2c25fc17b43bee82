"""Load plugins, check them, and collect what they hand over. The only module that calls pluggy."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import pluggy

from plugins import hookspecs
from plugins.interfaces import Observer, ProviderType, RequestFilter, TransformFactory

ENTRY_POINT_GROUP = "tidegate"
BUILTIN_MODULES = ("plugins.providers.openai_compatible", "backend.client")
OWN_KEYS = ("on_error", "timeout_s")
_T = TypeVar("_T")


class PluginFault(Exception):
    """A plugin that cannot be used; the message names it and says why. Refuses the start."""


@dataclass(frozen=True, slots=True)
class PluginRules:
    """Tidegate's own two keys of a plugin's table."""

    name: str
    on_error: str = "block"  # "block" | "allow"
    timeout_s: float = 5.0


@dataclass(slots=True)
class Parts:
    """Everything that plugins handed over, in the order in which it runs."""

    provider_types: dict[str, ProviderType] = field(default_factory=dict[str, ProviderType])
    filters: list[tuple[PluginRules, RequestFilter]] = field(
        default_factory=list[tuple[PluginRules, RequestFilter]]
    )
    transforms: list[tuple[PluginRules, TransformFactory]] = field(
        default_factory=list[tuple[PluginRules, TransformFactory]]
    )
    observers: list[tuple[PluginRules, Observer]] = field(
        default_factory=list[tuple[PluginRules, Observer]]
    )


def collect_parts(
    enabled: list[str], tables: Mapping[str, Mapping[str, Any]], base_dir: Path
) -> Parts:
    """Load the built-in plugins and those in `enabled` (entry-point names or .py files), in that order.

    Raises:
        PluginFault: unknown name, failing import, unknown hook, a provider type twice, or a table without its plugin.
    """
    parts = Parts()
    for name in BUILTIN_MODULES:
        _collect(parts, importlib.import_module(name), PluginRules(name), {})
    seen: set[str] = set()
    for entry in enabled:
        name = Path(entry).stem if entry.endswith(".py") else entry
        if name in seen:
            raise PluginFault(f"plugin {name}: enabled twice")
        seen.add(name)
        table = dict(tables.get(name, {}))
        rules = PluginRules(name, **{key: table.pop(key) for key in OWN_KEYS if key in table})
        _collect(parts, _load(entry, base_dir), rules, table)
    for name in tables:
        if name not in seen:
            raise PluginFault(f"plugins.{name}: a table for a plugin that is not enabled")
    return parts


def _load(entry: str, base_dir: Path) -> Any:
    try:
        return _load_file(base_dir / entry) if entry.endswith(".py") else _load_entry_point(entry)
    except PluginFault:
        raise
    except Exception as exc:
        raise PluginFault(f"plugin {entry}: import failed: {type(exc).__name__}: {exc}") from exc


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise PluginFault(f"plugin {path}: no such file")
    name = f"tidegate_plugin_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: dataclasses and msgspec look types up there
    spec.loader.exec_module(module)
    return module


def _load_entry_point(name: str) -> Any:
    found = list(importlib.metadata.entry_points(group=ENTRY_POINT_GROUP, name=name))
    if not found:
        known = sorted(importlib.metadata.entry_points(group=ENTRY_POINT_GROUP).names)
        raise PluginFault(f"plugin {name}: not installed; installed: {', '.join(known) or 'none'}")
    if len(found) > 1:
        raise PluginFault(f"plugin {name}: {len(found)} installed packages bring one of this name")
    return found[0].load()


def _collect(parts: Parts, plugin: Any, rules: PluginRules, settings: Mapping[str, Any]) -> None:
    """Call each hook of one plugin once. A manager of its own keeps the order ours, not pluggy's last-first."""
    manager = pluggy.PluginManager("tidegate")
    manager.add_hookspecs(hookspecs)
    try:
        manager.register(plugin, name=rules.name)
        manager.check_pending()
    except pluggy.PluginValidationError as exc:
        raise PluginFault(f"plugin {rules.name}: {exc}") from exc
    if not manager.get_hookcallers(plugin):
        raise PluginFault(f"plugin {rules.name}: has no hook of ours; see docs/plugins.md")

    def add_provider_type(provider_type: ProviderType) -> None:
        if provider_type.name in parts.provider_types:
            raise PluginFault(f"plugin {rules.name}: provider type {provider_type.name} is taken")
        parts.provider_types[provider_type.name] = provider_type

    try:
        hook = manager.hook
        hook.register_provider_types(register=add_provider_type)
        hook.register_filters(register=_adder(rules, parts.filters), settings=settings)
        hook.register_transforms(register=_adder(rules, parts.transforms), settings=settings)
        hook.register_observers(register=_adder(rules, parts.observers), settings=settings)
    except PluginFault:
        raise
    except Exception as exc:
        raise PluginFault(f"plugin {rules.name}: {type(exc).__name__}: {exc}") from exc


def _adder(rules: PluginRules, into: list[tuple[PluginRules, _T]]) -> Callable[[_T], None]:
    return lambda part: into.append((rules, part))
