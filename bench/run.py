"""`make bench`: everything that needs no other product, in under five minutes; peers join in by flags.

    python bench/run.py [--full] [--litellm CMD] [--llama-server CMD --llama-model FILE]
        [--transformers CMD --transformers-model FOLDER] [--load-tool PATH --mock-tool PATH]
        [--skip gateway,engine,codec,kernels]

Short samples on purpose: they show gross changes. `--full` takes what the pages in results/ were taken with.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
TOTAL_S = 280.0
MODEL = ROOT / "data" / "models" / "smollm2-135m-instruct.q4_1.gguf"


def parts(args: argparse.Namespace) -> dict[str, list[str]]:
    """Name -> script and its options, in the order in which they run."""
    short_gateway = [] if args.full else ["--rounds", "2", "--seconds", "2"]
    short_engine = [] if args.full else ["--rounds", "1", "--levels", "1,4,16"]
    return {
        "gateway": [
            "gateway_overhead.py",
            *short_gateway,
            *_given(args, "litellm", "load_tool", "mock_tool"),
        ],
        "engine": [
            "engine_serving.py",
            *short_engine,
            *_given(args, "llama_server", "llama_model", "transformers", "transformers_model"),
        ],
        "codec": ["endpoint_codec.py"],
        "kernels": ["native_step.py", "--model", str(MODEL), "--repeat", "5"],
    }


def _given(args: argparse.Namespace, *names: str) -> list[str]:
    return [
        text
        for name in names
        if (value := getattr(args, name))
        for text in (f"--{name.replace('_', '-')}", value)
    ]


def run_part(name: str, command: list[str], limit_s: float | None) -> bool:
    """Whether it ended well and in time."""
    load = os.getloadavg()[0]
    print(f"\n# {name}: {' '.join(command)}  (load average {load:.1f})\n", flush=True)
    begin_s = time.monotonic()
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
        [sys.executable, str(HERE / command[0]), *command[1:]],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
    )
    try:
        code = process.wait(limit_s)
        result = "done" if code == 0 else f"FAILED with exit code {code}"
    except subprocess.TimeoutExpired:
        process.terminate()
        code, result = process.wait(), "stopped: this machine is too busy for it"
    print(f"\n{name}: {result} after {time.monotonic() - begin_s:.0f} s", flush=True)
    return code == 0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--full", action="store_true")
    add("--skip", default="", help="parts to leave out, with commas between")
    for name in ("litellm", "load-tool", "mock-tool", "llama-server", "llama-model"):
        add(f"--{name}", default="")
    for name in ("transformers", "transformers-model"):
        add(f"--{name}", default="")
    args = parser.parse_args()
    chosen = {name: c for name, c in parts(args).items() if name not in args.skip.split(",")}
    if os.getloadavg()[0] > 0.5 * (os.cpu_count() or 1):
        print("This machine is busy: expect numbers that are too low, and read `foreign load`.")
    ends_at_s = time.monotonic() + TOTAL_S
    results: list[bool] = []
    for name, command in chosen.items():
        limit_s = None if args.full else max(1.0, ends_at_s - time.monotonic())
        results.append(run_part(name, command, limit_s))
    sys.exit(0 if all(results) else 1)


if __name__ == "__main__":
    main()
