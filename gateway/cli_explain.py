"""`tidegate explain`: which model goes where, and in which order plugins run."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from gateway.config import Config
from plugins.manager import Parts


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
    table = Table("provider", "type", "where", title="Providers", title_justify="left")
    for provider in config.providers:
        table.add_row(provider.name, provider.type, provider.base_url or provider.path)
    return table


def _stages(parts: Parts) -> Table:
    table = Table("stage", "plugin", "part", "on error", "timeout", title="Plugins, as they run")
    table.title_justify = "left"
    stages = (
        ("1 filters", parts.filters),
        ("2 transforms", parts.transforms),
        ("3 observers", parts.observers),
    )
    for stage, registered in stages:
        for rules, part in registered:
            name = getattr(part, "__qualname__", type(part).__qualname__)
            table.add_row(stage, rules.name, name, rules.on_error, f"{rules.timeout_s:g} s")
        if not registered:
            table.add_row(stage, "-", "-", "-", "-")
    return table
