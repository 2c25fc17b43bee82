"""The rules of the house that no linter knows: one root, no drawers, small files, short functions."""

from __future__ import annotations

import ast
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("gateway", "plugins", "cache", "backend")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_KERNEL_LINES = 100


def _functions(path: Path) -> list[tuple[str, int]]:
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return [
        (f"{path.relative_to(ROOT)}:{node.name}", (node.end_lineno or 0) - node.lineno + 1)
        for node in nodes
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def test_the_four_packages_share_one_parent() -> None:
    found = {Path(__import__(name).__file__).resolve().parent.parent for name in PACKAGES}
    assert found == {ROOT}


@pytest.mark.parametrize("name", ["utils", "helpers", "common", "misc"])
def test_no_module_is_a_drawer(name: str) -> None:
    assert not [path for path in SOURCES if path.stem == name]


def test_no_file_holds_two_ideas() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in SOURCES}
    assert {name: n for name, n in lengths.items() if n > MAX_FILE_LINES} == {}
    filled = [n for n in lengths.values() if n]
    assert statistics.median(filled) <= 150


def test_functions_stay_readable() -> None:
    functions = [item for path in SOURCES for item in _functions(path)]
    allowed = {
        name: MAX_KERNEL_LINES if name.startswith("backend/kernels") else MAX_FUNCTION_LINES
        for name, _ in functions
    }
    assert [(name, n) for name, n in functions if n > allowed[name]] == []
    lengths = sorted(n for _, n in functions)
    assert statistics.median(lengths) <= 8
    assert lengths[int(len(lengths) * 0.9)] <= 30


def test_a_gateway_process_never_imports_torch() -> None:
    """Also not by way of the plugin manager, which loads the engine's client."""
    probe = (
        "import sys; from pathlib import Path; import gateway.app, gateway.server, gateway.cli;"
        "from plugins.manager import collect_parts; collect_parts([], {}, Path('.'));"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", probe], cwd=ROOT, check=False).returncode == 0
