"""`tidegate serve --config FILE` with the plugin scripted_engine.py enabled, for configs that cannot name it.

A copy of FILE that enables the plugin is written beside it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PLUGIN = Path(__file__).with_name("scripted_engine.py")


def with_plugin(config: Path) -> Path:
    """A config that has plugins of its own is taken as it is."""
    text = config.read_text(encoding="utf-8")
    if "[plugins]" in text:
        return config
    copy = config.with_name(f"scripted-{config.name}")
    copy.write_text(f'{text}\n[plugins]\nenabled = ["{PLUGIN}"]\n', encoding="utf-8")
    return copy


def main(argv: list[str]) -> int:
    at = argv.index("--config") + 1
    argv[at] = str(with_plugin(Path(argv[at])))
    os.environ["PYTHONPATH"] = str(ROOT)  # the gateway's own child processes too
    sys.path.insert(0, str(ROOT))
    from gateway.cli import main as tidegate

    return tidegate(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
