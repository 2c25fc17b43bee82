"""Commands that compute with models. The gateway never imports torch, so this process becomes another program."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

# Each module is the engine's, says itself what it lacks, and reads its own arguments.
BACKEND_COMMANDS = {
    "quantize": ("backend.quantize", "write a smaller copy of a model"),
    "distill-draft": ("backend.distill", "train a small head that guesses a model's next tokens"),
}


def become_backend_command(name: str, arguments: Sequence[str]) -> int:
    """Does not return: terminal, signals and exit code are the other program's."""
    module, _ = BACKEND_COMMANDS[name]
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])  # noqa: S606
