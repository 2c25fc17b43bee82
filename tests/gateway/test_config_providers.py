from __future__ import annotations

from pathlib import Path

import pytest

from gateway.config import parse_config
from tests.gateway.config_texts import GOOD, MODEL, SERVER, faults, parse


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_an_unknown_type_is_named_with_those_that_there_are() -> None:
    [line] = faults(GOOD.replace('"openai_compatible"', '"opnai"'))
    assert line.startswith('config.toml:5: providers[0].type: unknown type "opnai"; known: ')
    assert "openai_compatible" in line


def test_a_provider_name_with_a_slash_is_refused() -> None:
    lines = faults(GOOD.replace('"up"', '"u/p"'))
    assert lines[0].startswith('config.toml:4: providers[0].name: must not have a "/"')


def engine(path: str) -> str:
    return f'{SERVER}[[providers]]\nname = "up"\ntype = "engine"\npath = "{path}"\n'


def test_a_model_path_that_is_not_there_is_refused_as_it_was_written() -> None:
    [line] = faults(engine("no/such/model") + MODEL)
    assert line == 'config.toml:6: providers[0].path: no such file or folder: "no/such/model"'


def test_a_model_path_starts_at_the_config_file(folder: Path) -> None:
    (folder / "conf" / "model").mkdir(parents=True)
    (folder / "conf" / "model" / "config.json").write_text("{}")
    config = parse_config(engine("model") + MODEL, Path("conf/config.toml"))
    assert config.providers[0].path == str(folder / "conf" / "model")
    assert config.store.data_dir == folder / "conf" / "data"


@pytest.mark.parametrize("path", ["demo", "hub:owner/name"])
def test_names_of_models_are_left_as_they_are(path: str) -> None:
    assert parse(engine(path) + MODEL).providers[0].path == path


def test_a_template_that_is_not_there_is_refused() -> None:
    [line] = faults(engine("demo") + "template = 'no.jinja'\n" + MODEL)
    assert line == 'config.toml:7: providers[0].template: no such file: "no.jinja"'


def test_keys_that_the_engine_does_not_take_are_refused() -> None:
    lines = faults(engine("demo") + "base_url = 'http://x'\nmax_retries = 1\n" + MODEL)
    assert [line.split(": ")[1] for line in lines] == [
        "providers[0].base_url",
        "providers[0].max_retries",
    ]


PLUGIN = """
from plugins.hookspecs import hookimpl

class Type:
    name = "mine"
    default_base_url = "http://default/v1/"
    def check(self, settings):
        if settings.options.get("raise"):
            raise RuntimeError("first line\\nsecond line")
        return [] if "n" in settings.options else ["options.n: required"]

@hookimpl
def register_provider_types(register):
    register(Type())
"""
MINE = '[[providers]]\nname = "up"\ntype = "mine"\noptions = { n = 1 }\n'
WITH_PLUGIN = "[plugins]\nenabled = ['mine.py']\n"


def test_a_type_of_a_plugin_is_known_and_brings_its_base_url(folder: Path) -> None:
    (folder / "mine.py").write_text(PLUGIN)
    config = parse(SERVER + MINE + MODEL + WITH_PLUGIN)
    assert config.providers[0].options == {"n": 1}
    assert config.providers[0].base_url == "http://default/v1"


def test_what_a_type_finds_wrong_is_a_fault_of_its_table(folder: Path) -> None:
    (folder / "mine.py").write_text(PLUGIN)
    [line] = faults(SERVER + MINE.replace("n = 1", "") + MODEL + WITH_PLUGIN)
    assert line == "config.toml:6: providers[0].options.n: required"


def test_a_type_whose_check_breaks_is_one_line(folder: Path) -> None:
    (folder / "mine.py").write_text(PLUGIN)
    [line] = faults(SERVER + MINE.replace("n = 1", "raise = true") + MODEL + WITH_PLUGIN)
    assert line.endswith("the check of mine failed: RuntimeError: first line second line")


PLUGIN_FAULTS = [
    ("enabled = ['ghost']", "plugin ghost: not installed"),
    ("enabled = ['ghost.py']", "no such file"),
    ("enabled = ['broken.py']", "plugin broken.py: import failed: ModuleNotFoundError: No module"),
    ("enabled = ['mine.py', 'mine.py']", "plugin mine: enabled twice"),
    ("[plugins.redact]\nx = 1", "plugins.redact: a table for a plugin that is not enabled"),
    ("enabled = 'mine.py'", "expected a list, got a string"),
    ("enabled = ['mine.py']\n[plugins.mine]\ntimeout_s = 0", "timeout_s: expected a number > 0.0"),
    ("enabled = ['mine.py']\n[plugins.mine]\non_error = 'x'", 'must be one of "block", "allow"'),
    ("enabled = []\n[plugins.redact]", "plugins.redact: a table for a plugin that is not enabled"),
]


@pytest.mark.parametrize(("text", "message"), PLUGIN_FAULTS)
def test_a_plugin_that_cannot_be_used_is_named(text: str, message: str, folder: Path) -> None:
    (folder / "mine.py").write_text(PLUGIN)
    (folder / "broken.py").write_text("import no_such_module\n")
    [line] = faults(f"{GOOD}[plugins]\n{text}\n")
    assert message in line


def test_the_table_of_a_plugin_is_handed_on(folder: Path) -> None:
    (folder / "mine.py").write_text(PLUGIN)
    config = parse(f"{GOOD}{WITH_PLUGIN}[plugins.mine]\nanything = [1]\ntimeout_s = 2\n")
    assert config.plugins.tables == {"mine": {"anything": [1], "timeout_s": 2}}
