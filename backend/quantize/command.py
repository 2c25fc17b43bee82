"""`tidegate quantize MODEL --to w4 --out DIR`: a smaller copy of a model, and what it cost.

A .gguf file becomes a .gguf file, a transformers folder a transformers folder, so settings, tokenizer and chat
template go along as they are. DIR appears whole or not at all.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from backend.models.checkpoint import read_json
from backend.models.errors import ModelLoadError
from backend.models.locate import locate_model
from backend.progress_bar import download_bar, progress_bar
from backend.quant.w4 import GROUP_SIZES
from backend.quantize.calibration import InputMoments, calibrate
from backend.quantize.conversion import Conversion
from backend.quantize.measure import Measured, measure
from backend.quantize.report import print_report

EXIT_FAULT, EXIT_INTERRUPTED = 2, 130
MAX_CALIBRATION_BYTES = 1 << 20


class QuantizeFault(Exception):
    """The user's to mend; the message is one line."""


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 2 for a fault that is the user's to mend, 130 when interrupted."""
    args = _parser().parse_args(argv)
    try:
        _quantize(args)
    except (QuantizeFault, ModelLoadError, ValueError, OSError, MemoryError) as exc:
        print(f"tidegate quantize: {exc or type(exc).__name__}", file=sys.stderr)  # noqa: T201
        return EXIT_FAULT
    except KeyboardInterrupt:
        done = f"{args.out} is complete" if args.out.exists() else "nothing was written"
        print(f"tidegate quantize: interrupted; {done}", file=sys.stderr)  # noqa: T201
        return EXIT_INTERRUPTED
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tidegate quantize",
        description="Write a smaller copy of a model that `tidegate serve --model DIR` serves.",
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help='a folder, a .gguf file, "owner/name" on the hub, or "demo"')
    add("--to", required=True, choices=("w8", "w4"), help="8 bits a weight, or 4 in groups")
    add("--out", required=True, type=Path, metavar="DIR", help="must not exist yet")
    add("--group-size", type=int, choices=GROUP_SIZES, help="of w4, in columns (default 32)")
    add(
        "--calibrate",
        type=Path,
        metavar="FILE",
        help="text like that which the model will meet: w4 then fits the inputs it sees",
    )
    add("--report-tokens", type=int, default=4096, metavar="N", help="0: no report (default 4096)")
    add("--threads", type=int, metavar="N", help="default: what the machine can spare")
    add("--data-dir", type=Path, default=Path("data"), metavar="DIR", help="of the demo model")
    return parser


def _quantize(args: argparse.Namespace) -> None:
    _check(args)
    text = _calibration_text(args.calibrate)
    with download_bar("fetching the demo model") as bar:
        path = locate_model(args.model, args.data_dir, bar)
    source = _weights_of(path)
    if source.is_file() and args.group_size not in (None, 32):
        raise QuantizeFault(f"--group-size {args.group_size}: a .gguf file has groups of 32")
    moments = None if text is None else _calibrated(path, text)
    conversion = Conversion(args.to, args.group_size or 32, moments)
    with (
        _appearing(args.out) as folder,
        progress_bar("quantizing", conversion.count(source)) as bar,
    ):
        conversion.write(source, folder, bar.advance)
    print(f"{args.out}: written")  # noqa: T201
    if args.report_tokens:
        measured = [_measured(each, args) for each in (path, args.out)]
        print_report(args.to, *measured)


def _check(args: argparse.Namespace) -> None:
    if args.out.exists():
        raise QuantizeFault(f"--out {args.out}: exists already; choose another folder")
    if not args.out.absolute().parent.is_dir():
        raise QuantizeFault(f"--out {args.out}: {args.out.absolute().parent} is no folder")
    for option in ("group_size", "calibrate"):
        if args.to != "w4" and getattr(args, option) is not None:
            raise QuantizeFault(f"--{option.replace('_', '-')}: only of --to w4")
    if args.threads is not None and args.threads < 1:
        raise QuantizeFault(f"--threads must be at least 1, got {args.threads}")
    if args.report_tokens < 0 or args.report_tokens == 1:
        raise QuantizeFault(f"--report-tokens must be 0, or 2 and more, got {args.report_tokens}")


def _calibration_text(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        with path.open("rb") as file:
            text = file.read(MAX_CALIBRATION_BYTES).decode("utf-8", "ignore")
    except OSError as exc:
        raise QuantizeFault(f"--calibrate {path}: {exc.strerror}") from exc
    if len(text) < 1000:
        raise QuantizeFault(
            f"--calibrate {path}: 1000 characters or more are needed, got {len(text)}"
        )
    return text


def _weights_of(path: Path) -> Path:
    """The .gguf file, or the transformers folder. ModelLoadError for one that is quantized already."""
    if path.is_file():
        return path
    if not (path / "config.json").exists():
        files = sorted(path.glob("*.gguf"))
        if len(files) != 1:
            raise QuantizeFault(f"{path}: neither a config.json nor exactly one .gguf file in it")
        return files[0]
    method = (read_json(path / "config.json").get("quantization_config") or {}).get("quant_method")
    if method is not None:
        raise QuantizeFault(f"{path}: quantized already ({method}); start from the original")
    return path


def _calibrated(path: Path, text: str) -> InputMoments:
    with progress_bar("calibrating", len(text)) as bar:
        try:
            return calibrate(path, text, note=bar.advance)
        except ValueError as exc:
            raise QuantizeFault(f"--calibrate: {exc}") from exc


@contextmanager
def _appearing(out: Path) -> Iterator[Path]:
    """A folder to fill, which becomes `out` at the end; whatever goes wrong, nothing is left."""
    scratch = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.absolute().parent))
    try:
        folder = scratch / out.name
        folder.mkdir()
        yield folder
        folder.rename(out)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _measured(path: Path, args: argparse.Namespace) -> Measured:
    with progress_bar(f"measuring {path.name}", args.report_tokens) as bar:
        return measure(path, args.report_tokens, args.threads, bar.advance)
