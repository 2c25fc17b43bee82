"""What the pages say is what the code does."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from backend.models.families import FAMILIES, Family
from backend.options import EngineOptions
from gateway import config_schema
from gateway.cli import build_parser
from plugins import errors, hookspecs

ROOT = Path(__file__).resolve().parent.parent
PAGES = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md")}
README = (ROOT / "README.md").read_text(encoding="utf-8")
ALL_PAGES = {**PAGES, "README.md": README}


def _hooks() -> list[tuple[str, str]]:
    functions = inspect.getmembers(hookspecs, inspect.isfunction)
    own = [(n, f) for n, f in functions if f.__module__ == hookspecs.__name__]
    return [(name, ", ".join(inspect.signature(f).parameters)) for name, f in own]


@pytest.mark.parametrize(("name", "arguments"), _hooks())
def test_every_hook_has_a_heading_with_its_signature(name: str, arguments: str) -> None:
    assert f"### {name}({arguments})" in PAGES["plugins.md"]


def _config_keys() -> list[str]:
    tables = {
        name: struct
        for name, struct in vars(config_schema).items()
        if isinstance(struct, type)
        and name.endswith("Config")
        and hasattr(struct, "__struct_fields__")
    }
    return sorted(
        {key for struct in tables.values() for key in struct.__struct_fields__} - {"tables"}
    )


@pytest.mark.parametrize("key", _config_keys())
def test_every_config_key_is_on_the_configuration_page(key: str) -> None:
    assert re.search(rf"`[^`]*\b{key}\b[^`]*`", PAGES["configuration.md"])


@pytest.mark.parametrize("key", EngineOptions.__struct_fields__)
def test_every_key_of_the_engine_table_is_on_its_page(key: str) -> None:
    assert f"`{key}`" in PAGES["engine.md"]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_model_family_is_in_the_table_by_its_names(family: Family) -> None:
    for name in (*family.hf_names, *family.gguf_names):
        assert f"`{name}`" in PAGES["engine.md"]


def _error_classes() -> list[type[errors.GatewayError]]:
    classes = inspect.getmembers(errors, inspect.isclass)
    return [cls for _, cls in classes if issubclass(cls, errors.GatewayError)]


@pytest.mark.parametrize("error", _error_classes(), ids=lambda cls: cls.__name__)
def test_every_error_is_in_the_tree_with_its_true_status(error: type[errors.GatewayError]) -> None:
    assert re.search(rf"{error.__name__} +{error.status}\b", errors.__doc__ or "")


def test_every_link_between_pages_leads_somewhere() -> None:
    for page, text in ALL_PAGES.items():
        base = ROOT if page == "README.md" else ROOT / "docs"
        for target in re.findall(r"\]\(([^)#:]+)\)", text):
            assert (base / target).exists(), f"{page}: {target}"


def test_every_tidegate_command_in_the_pages_parses() -> None:
    parser = build_parser()
    commands = [
        line.split("#")[0].removeprefix("$ ").split()[1:]
        for text in ALL_PAGES.values()
        for block in re.findall(r"```(?:console|bash|sh)\n(.*?)```", text, re.DOTALL)
        for line in block.splitlines()
        if line.removeprefix("$ ").startswith("tidegate ")
    ]
    assert commands
    for words in commands:
        parser.parse_args(words)


def test_every_make_target_in_the_pages_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for text in ALL_PAGES.values():
        for target in re.findall(r"(?:`|\$ )make ([a-z-]+)", text):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_the_changelog_names_the_version() -> None:
    version = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert version
    assert "## [Unreleased]" in changelog or f"## [{version[1]}]" in changelog
