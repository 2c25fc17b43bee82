"""The Markdown tables of engine_serving.py."""

from __future__ import annotations

import statistics
from typing import Any

from process_meter import machine_name

Sample = dict[str, Any]
COLUMNS = {
    "tok/s": "tok_s",
    "TTFT p50 ms": "ttft_p50_ms",
    "TTFT p95 ms": "ttft_p95_ms",
    "TPOT p50 ms": "tpot_p50_ms",
    "tok/CPU-s": "tok_cpu_s",
    "RSS MB": "rss_mb",
    "foreign load": "foreign",
}


def print_report(samples: list[Sample]) -> None:
    """Medians of the calmer half of the samples of each cell; in brackets the range of all of them."""
    print(f"\nMachine: {machine_name()}. Median of the calmer half of the rounds (range of all).\n")
    servers = list(dict.fromkeys(sample["server"] for sample in samples))
    for level in sorted({sample["level"] for sample in samples}):
        rows = {
            server: [s for s in samples if s["level"] == level and s["server"] == server]
            for server in servers
        }
        _print_level(level, {server: own for server, own in rows.items() if own})
    failed = [sample for sample in samples if sample["completed"] < sample["requests"]]
    print(f"samples with failed requests: {len(failed)} of {len(samples)}")


def _print_level(level: int, rows: dict[str, list[Sample]]) -> None:
    print(f"**c={level}**\n")
    print(f"| server | {' | '.join(COLUMNS)} | Tidegate is faster by |")
    print("|---" * (len(COLUMNS) + 2) + "|")
    ours = rows.get("tidegate")
    for server, own in rows.items():
        cells = [_cell(own, key) for key in COLUMNS.values()]
        ratio = "-" if not ours or server == "tidegate" else _ratio(ours, own)
        print(f"| {server} | {' | '.join(cells)} | {ratio} |")
    print()


def _ratio(ours: list[Sample], peer: list[Sample]) -> str:
    return f"{_median(ours, 'tok_s') / _median(peer, 'tok_s'):.2f}x"


def _median(samples: list[Sample], key: str) -> float:
    calm = sorted(samples, key=lambda sample: sample["foreign"])[: (len(samples) + 1) // 2]
    return statistics.median(sample[key] for sample in calm)


def _cell(samples: list[Sample], key: str) -> str:
    text = _text(_median(samples, key))
    if len(samples) == 1:
        return text
    values = [sample[key] for sample in samples]
    return f"{text} ({_text(min(values))}-{_text(max(values))})"


def _text(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.{1 if number >= 10 else 2}f}"
