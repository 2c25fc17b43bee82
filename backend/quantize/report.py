"""What a quantization cost and what it gained, before and after."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from backend.quantize.measure import Measured


def print_report(to: str, before: Measured, after: Measured) -> None:
    table = Table("", "before", to, "change", title="On one stream, and a held text")
    table.title_justify = "left"
    rows = (
        ("weights, MB", before.weight_bytes / 1e6, after.weight_bytes / 1e6, ".1f"),
        ("perplexity", before.perplexity, after.perplexity, ".3f"),
        ("output tokens/s", before.tokens_per_s, after.tokens_per_s, ".1f"),
    )
    for name, old, new, form in rows:
        table.add_row(name, f"{old:{form}}", f"{new:{form}}", f"{100 * (new / old - 1):+.2f} %")
    Console().print(table)
