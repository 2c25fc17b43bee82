"""A plugin with the provider type "scripted_engine": the engine, with a script in place of the model.

`options.script` names the JSON file. `serve_scripted.py` starts a gateway that has it enabled.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from backend.client import EngineProvider
from backend.connection import Replica
from backend.launch import socket_path
from backend.options import WorkerSettings
from backend.protocol import encode_frame
from plugins.hookspecs import hookimpl
from plugins.interfaces import ProcessSpec, Provider, ProviderSettings, ProviderType, Runtime

ROOT = Path(__file__).resolve().parents[2]


class ScriptedEngineType:
    name = "scripted_engine"
    default_base_url = ""

    def check(self, settings: ProviderSettings) -> list[str]:
        script = str(settings.options.get("script", ""))
        return [] if Path(script).is_file() else [f"options.script: {script}: no such file"]

    def prepare(self, settings: ProviderSettings, runtime: Runtime) -> None:
        pass

    def processes(self, settings: ProviderSettings, runtime: Runtime) -> list[ProcessSpec]:
        worker = WorkerSettings(
            f"{settings.name}/0",
            str(socket_path(settings.name, runtime, 0)),
            str(settings.options["script"]),
            str(runtime.data_dir),
        )
        return [
            ProcessSpec(
                f"engine {settings.name}/0",
                (sys.executable, "-m", "tests.backend.scripted_worker"),
                {"PYTHONPATH": str(ROOT)},
                bytes(encode_frame(worker)),
            )
        ]

    def build(self, settings: ProviderSettings, runtime: Runtime) -> Provider:
        replica = Replica(f"{settings.name}/0", socket_path(settings.name, runtime, 0))
        return EngineProvider(settings.name, [replica], settings.timeout)


@hookimpl
def register_provider_types(register: Callable[[ProviderType], None]) -> None:
    register(ScriptedEngineType())
