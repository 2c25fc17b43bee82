"""Commands of the engine. They import torch, which the gateway never does, so each runs in a process of its own."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Sequence

EXIT_FAULT = 2
# By name: the module that is the command, and what `tidegate --help` says of it.
ENGINE_COMMANDS = {
    "distill-draft": (
        "backend.distill",
        "train a small head that guesses a model's next tokens",
    ),
}


def run_engine_command(name: str, arguments: Sequence[str]) -> int:
    """The exit code of the command, which parses its own arguments; 2 when the engine's packages are missing."""
    if importlib.util.find_spec("torch") is None:
        print(
            f"tidegate {name}: needs the engine: pip install 'tidegate[backend]'", file=sys.stderr
        )
        return EXIT_FAULT
    module, _ = ENGINE_COMMANDS[name]
    with subprocess.Popen([sys.executable, "-m", module, *arguments]) as process:
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:
                continue  # Ctrl-C reached the command as well, which ends in order
