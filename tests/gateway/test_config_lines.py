from __future__ import annotations

import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config_lines import key_lines

TEXT = '''# a comment = 1
top = 1
[server]   # another [comment]
host = "x # no comment = 1"
"quoted key" = 1
[[models]]
name = """
several
lines"""
targets = [
  "a",  # one = 1
  "b",
]
cache = { mode = "off", nested = { deep = [1,
  2] } }
[models.slo]
ttft_ms = 1
[[models]]
name = \'\'\'x\'\'\'
a.b.c = 1
[[models.parts]]
x = 1
[[models.parts]]
x = 2
[auth]
[[auth.keys]]
name = 'k'
'''


@pytest.mark.parametrize(
    ("at", "line"),
    [
        (("top",), 2),
        (("server",), 3),
        (("server", "host"), 4),
        (("server", "quoted key"), 5),
        (("models",), 6),
        (("models", 0), 6),
        (("models", 0, "name"), 7),
        (("models", 0, "targets", 0), 11),
        (("models", 0, "targets", 1), 12),
        (("models", 0, "cache", "mode"), 14),
        (("models", 0, "cache", "nested", "deep", 1), 15),
        (("models", 0, "slo"), 16),
        (("models", 0, "slo", "ttft_ms"), 17),
        (("models", 1), 18),
        (("models", 1, "a", "b", "c"), 20),
        (("models", 1, "parts", 1, "x"), 24),
        (("auth", "keys", 0, "name"), 27),
    ],
)
def test_each_key_is_found_on_its_line(at: tuple[str | int, ...], line: int) -> None:
    assert key_lines(TEXT)[at] == line


def places(value: Any, at: tuple[str | int, ...] = ()) -> set[tuple[str | int, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value)
    found: set[tuple[str | int, ...]] = set()
    for key, item in items:
        found |= {(*at, key)} | (
            places(item, (*at, key)) if isinstance(item, (dict, list)) else set()
        )
    return found


def test_no_key_that_tomllib_reads_is_missing() -> None:
    assert places(tomllib.loads(TEXT)) == set(key_lines(TEXT))


@given(st.text(alphabet="ab=[]{}.,'\"#\\ \n01"))
def test_any_text_is_scanned_without_an_error(text: str) -> None:
    key_lines(text)


@given(st.lists(st.text(alphabet="ab\"'\\\n#[]{}=,", max_size=12), max_size=4))
def test_strings_never_hide_the_key_behind_them(strings: list[str]) -> None:
    quoted = ["'''\n" + text.replace("'", "") + "'''" for text in strings]
    text = f"first = [{', '.join(quoted)}]\nlast = 1\n"
    assert tomllib.loads(text)["last"] == 1
    assert key_lines(text)["last",] == text.count("\n")
