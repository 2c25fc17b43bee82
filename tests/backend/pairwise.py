"""Few rows of a product that still hold every pair of values of any two axes."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

Row = dict[str, Any]


def full_product(axes: Mapping[str, Sequence[Any]]) -> list[Row]:
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def pairwise(axes: Mapping[str, Sequence[Any]]) -> list[Row]:
    """Greedy: the row that adds the most new pairs, until there are none."""
    rows, missing, chosen = full_product(axes), set[frozenset[Any]](), list[Row]()
    for row in rows:
        missing |= pairs(row)
    while missing:
        best = max(rows, key=lambda row: len(pairs(row) & missing))
        missing -= pairs(best)
        chosen.append(best)
    return chosen


def pairs(row: Row) -> set[frozenset[Any]]:
    return {frozenset(pair) for pair in itertools.combinations(row.items(), 2)}
