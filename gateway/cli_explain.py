"""`tidegate explain`: which model goes where, and in which order plugins run."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from gateway.config import Config
from plugins.manager import Parts, PluginRules


def print_explanation(config: Config) -> None:
    console = Console()
    console.print(_models(config))
    console.print(_providers(config))
    console.print(_stages(config.parts))


def _models(config: Config) -> Table:
    table = Table("model", "policy", "targets, in order", title="Models", title_justify="left")
    for model in config.models:
        table.add_row(model.name, model.policy, "\n".join(model.targets))
    return table


def _providers(config: Config) -> Table:
    table = Table("provider", "type", title="Providers", title_justify="left")
    table.add_column("where", overflow="fold")  # whole, so that it can be copied
    for provider in config.providers:
        table.add_row(provider.name, provider.type, provider.base_url or provider.path)
    return table


def _stages(parts: Parts) -> Table:
    """`-` where a rule means nothing: a transform is not awaited, an observer cannot fail a request."""
    table = Table("stage", "plugin", "part", "on error", "timeout", title="Plugins, as they run")
    table.title_justify = "left"
    for rules, part in parts.filters:
        table.add_row("1 filters", rules.name, _name(part), rules.on_error, _timeout(rules))
    for rules, part in parts.transforms:
        table.add_row("2 transforms", rules.name, _name(part), rules.on_error, "-")
    for rules, part in parts.observers:
        table.add_row("3 observers", rules.name, _name(part), "-", _timeout(rules))
    if not table.row_count:
        table.add_row("none", "-", "-", "-", "-")
    return table


def _name(part: object) -> str:
    name: str = getattr(part, "__qualname__", type(part).__qualname__)
    return name.rpartition("<locals>.")[2]


def _timeout(rules: PluginRules) -> str:
    return f"{rules.timeout_s:g} s"
