"""The Markdown tables of gateway_overhead.py."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from gateway_samples import CASES
from process_meter import machine_name

Sample = dict[str, Any]
Value = Callable[[Sample], float | None]


def print_report(samples: list[Sample]) -> None:
    """Medians of the calmer half of the samples of each cell; in brackets the range of all of them."""
    print(f"\nMachine: {machine_name()}. Median of the calmer half of the rounds (range of all).\n")
    targets = list(dict.fromkeys(sample["target"] for sample in samples))
    for case in CASES:
        rows = {t: [s for s in samples if s["case"] == case and s["target"] == t] for t in targets}
        rows = {target: own for target, own in rows.items() if own}
        if rows:
            _print_case(case, rows)


def _print_case(case: str, rows: dict[str, list[Sample]]) -> None:
    unit, rate = ("chunk", "chunks_s") if CASES[case].streams else ("request", "rps")
    timed = "chunk_us" if CASES[case].streams else "lat_us"
    direct = rows.get("direct", [])
    columns: list[tuple[str, Value]] = [
        (f"{unit}s/s", lambda s: s[rate]),
        (f"CPU us/{unit}", lambda s: s["cpu_us"] if s["gateway_cores"] else None),
        (f"{unit} p50 us", lambda s: s[timed]["p50"]),
        (f"{unit} p95 us", lambda s: s[timed]["p95"]),
        ("RSS MB", lambda s: s["rss_mb"] or None),
        ("foreign load", lambda s: s["foreign"]),
        ("failed", lambda s: s["err"] + s["non2xx"]),
    ]
    if CASES[case].streams:
        columns.insert(4, ("TTFT p50 us", lambda s: s["ttft_us"]["p50"]))
    added = ("added p50 us", "added p95 us")
    print(f"**{CASES[case].title}**\n")
    print(f"| target | {' | '.join([name for name, _ in columns] + list(added))} |")
    print("|---" * (len(columns) + 3) + "|")
    for target, own in rows.items():
        cells = [_cell(own, value) for _, value in columns]
        cells += [_added(own, direct, timed, quantile) for quantile in ("p50", "p95")]
        print(f"| {target} | {' | '.join(cells)} |")
    print()


def _calm(samples: list[Sample]) -> list[Sample]:
    return sorted(samples, key=lambda sample: sample["foreign"])[: (len(samples) + 1) // 2]


def _cell(samples: list[Sample], value: Value) -> str:
    everything = [number for sample in samples if (number := value(sample)) is not None]
    calm = [number for sample in _calm(samples) if (number := value(sample)) is not None]
    if not calm:
        return "-"
    text = _text(statistics.median(calm))
    if len(everything) == 1:
        return text
    return f"{text} ({_text(min(everything))}-{_text(max(everything))})"


def _added(own: list[Sample], direct: list[Sample], timed: str, quantile: str) -> str:
    if not direct or own[0]["target"] == "direct":
        return "-"
    latency, base = (
        statistics.median(sample[timed][quantile] for sample in _calm(samples))
        for samples in (own, direct)
    )
    return _text(latency - base)


def _text(number: float) -> str:
    if number >= 100 or number == int(number):
        return f"{number:,.0f}"
    return f"{number:.2f}" if number < 10 else f"{number:.1f}"
