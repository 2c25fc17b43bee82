"""The command `tidegate`. Thin: reads arguments and prints; each command imports what it needs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gateway.cli_backend import BACKEND_COMMANDS, become_backend_command

if TYPE_CHECKING:
    from gateway.config import Config
    from gateway.control import ConfigSource

EXIT_FAULT = 2
EXIT_INTERRUPTED = 130
CONFIG_FILE = Path("config.toml")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 2 for a fault that is the user's to mend, said in one line each on stderr."""
    from gateway.config_faults import ConfigFaults  # noqa: PLC0415

    given = sys.argv[1:] if argv is None else argv
    if given and given[0] in BACKEND_COMMANDS:
        return become_backend_command(given[0], given[1:])
    parser = build_parser()
    if not given:
        parser.print_help(sys.stderr)
        return EXIT_FAULT
    args = parser.parse_args(given)
    command: Callable[[argparse.Namespace], int] = args.command
    try:
        return command(args)
    except ConfigFaults as exc:
        print(exc, file=sys.stderr)
        return EXIT_FAULT
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tidegate", description="One OpenAI-compatible endpoint for many models."
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    serve = commands.add_parser("serve", help="start the gateway")
    serve.set_defaults(command=_serve)
    what = serve.add_mutually_exclusive_group()
    what.add_argument("--config", type=Path, metavar="FILE", help="default: ./config.toml")
    what.add_argument(
        "--model",
        metavar="MODEL",
        help='serve one model without a config: a folder, a .gguf file, a hub name "owner/name", or "demo"',
    )
    serve.add_argument("--host", help="instead of server.host")
    serve.add_argument("--port", type=int, help="instead of server.port")
    serve.add_argument("--workers", type=int, metavar="N", help="instead of server.workers")

    for name, command, text in (
        ("validate", _validate, "check a config and stop"),
        ("explain", _explain, "show which model goes where, and in which order plugins run"),
    ):
        sub = commands.add_parser(name, help=text)
        sub.set_defaults(command=command)
        sub.add_argument("--config", type=Path, metavar="FILE", default=CONFIG_FILE)

    for name, (_, text) in BACKEND_COMMANDS.items():  # they read their arguments themselves
        commands.add_parser(name, help=text).add_argument("arguments", nargs=argparse.REMAINDER)
    commands.add_parser("version", help="show the version").set_defaults(command=_version)
    return parser


def _serve(args: argparse.Namespace) -> int:
    from gateway.cli_texts import banner  # noqa: PLC0415
    from gateway.supervisor import run_supervisor  # noqa: PLC0415

    source = _source(args)
    config = source.parse()
    print("tidegate: starting ...", flush=True)

    def announce(port: int) -> None:
        print(banner(config, port), flush=True)

    return run_supervisor(source, config, announce)


def _source(args: argparse.Namespace) -> ConfigSource:
    """The file that is asked for or lies here, else a config made up for one model."""
    from gateway.cli_texts import default_config  # noqa: PLC0415
    from gateway.config import read_text  # noqa: PLC0415
    from gateway.control import ConfigSource  # noqa: PLC0415

    given = {key: getattr(args, key) for key in ("host", "port", "workers")}
    server: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    overrides = {"server": server} if server else {}
    path: Path | None = args.config
    if path is None and args.model is None and CONFIG_FILE.exists():
        path = CONFIG_FILE
    if path is None:
        text = default_config("demo" if args.model is None else args.model)
        return ConfigSource(text, str(Path.cwd() / "built-in config"), overrides)
    return ConfigSource(read_text(path), str(path.absolute()), overrides)


def _validate(args: argparse.Namespace) -> int:
    from gateway.cli_texts import summary  # noqa: PLC0415

    print(f"{args.config}: ok\n{summary(_load(args))}")
    return 0


def _explain(args: argparse.Namespace) -> int:
    from gateway.cli_explain import print_explanation  # noqa: PLC0415

    print_explanation(_load(args))
    return 0


def _load(args: argparse.Namespace) -> Config:
    from gateway.config import load_config  # noqa: PLC0415

    return load_config(args.config)


def _version(args: argparse.Namespace) -> int:
    try:
        print(f"tidegate {version('tidegate')}")
    except PackageNotFoundError:
        print("tidegate (run from its sources, not installed)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
