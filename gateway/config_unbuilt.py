"""Keys of the contract that do nothing yet. Any value but the default is refused: to ignore it would be worse.

What comes to be built leaves this list.
"""

from __future__ import annotations

import msgspec

from gateway.config_faults import Faults
from gateway.config_reader import Reader
from gateway.config_schema import CacheConfig, ModelConfig, StoreConfig, TelemetryConfig
from plugins.interfaces import Limits

UNBUILT: tuple[tuple[type[msgspec.Struct], str], ...] = (
    (ModelConfig, "policy"),
    (CacheConfig, "mode"),
    (Limits, "budget_usd"),
    (Limits, "budget_window"),
    (StoreConfig, "on_limits_failure"),
    (TelemetryConfig, "otlp_endpoint"),
)


def check_unbuilt(reader: Reader, faults: Faults) -> None:
    for cls, key in UNBUILT:
        default = next(f.default for f in msgspec.structs.fields(cls) if f.name == key)
        instead = f'use "{default}"' if default else "leave it out"
        for at, row in reader.rows(cls):
            value = getattr(row, key)
            if value != default:
                shown = f'"{value}"' if isinstance(value, str) else value
                faults.add((*at, key), f"{shown} is not built yet; {instead}")
