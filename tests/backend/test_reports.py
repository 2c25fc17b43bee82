"""The 62 kinds of defects that users of other engines report: each has a test with its number, or a reason here.

The name is `test_report_NN_` and, as a rule, the project and number of the report that told of it first.
"""

from __future__ import annotations

import re
from pathlib import Path

NUM_REPORTS = 62
NOT_ON_A_CPU = "is about captured CUDA graphs, whose frozen sizes no CPU step has"
OPEN = {
    17: f"transformers#45323 {NOT_ON_A_CPU}",
    59: "vllm#30931: two adapters and one prompt; adapters are not built",
}


def _named() -> set[int]:
    found: set[int] = set()
    for file in Path(__file__).parent.glob("test_*.py"):
        text = file.read_text(encoding="utf-8")
        found |= {int(n) for n in re.findall(r"^(?:async )?def test_report_(\d\d)_", text, re.M)}
    return found


def test_every_report_has_a_test_or_a_reason() -> None:
    assert _named() | OPEN.keys() == set(range(1, NUM_REPORTS + 1))


def test_no_report_has_both() -> None:
    assert _named() & OPEN.keys() == set()
