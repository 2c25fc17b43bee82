from __future__ import annotations

import ast
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tomllib
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gateway.cli import main
from gateway.cli_texts import banner, default_config
from gateway.config import Config, ConfigFaults, parse_config

ROOT = Path(__file__).parents[2]
GATED = Path(__file__).parent / "data" / "gated.py"
CONFIG = f"""
[server]
port = 0
[auth]
mode = "open"
[plugins]
enabled = ["{GATED}"]
[[providers]]
name = "up"
type = "gated"
options = {{ gate = "gate" }}
[[models]]
name = "m"
targets = ["up/x"]
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.toml").write_text(CONFIG)
    (tmp_path / "bad.toml").write_text("prot = 1\n" + CONFIG)
    return tmp_path


def parse(text: str) -> Config:
    return parse_config(text, Path("config.toml"))


# -- Commands that only look ------------------------------------------------------------------------------------------


def test_validate_says_ok_and_what_the_config_means(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "--config", "good.toml"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("good.toml: ok\n")
    assert "providers   up (gated)" in out


@pytest.mark.parametrize("command", ["validate", "explain", "serve"])
def test_a_faulty_config_ends_every_command_with_2_and_its_lines(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--config", "bad.toml"]) == 2
    assert capsys.readouterr().err == "bad.toml:1: prot: unknown key; nearest: store\n"


def test_validate_without_a_config_names_the_file_that_it_missed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["validate"]) == 2
    assert capsys.readouterr().err == "config.toml: No such file or directory\n"


FILTERS = """
from plugins.hookspecs import hookimpl

class {name}:
    async def apply(self, request, context):
        return request

@hookimpl
def register_filters(register, settings):
    register({name}())
"""


def test_explain_shows_targets_and_plugins_in_the_order_in_which_they_are_used(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("Second", "First"):
        (folder / f"{name}.py").write_text(FILTERS.format(name=name))
    text = CONFIG.replace("enabled = [", 'enabled = ["First.py", "Second.py", ')
    (folder / "config.toml").write_text(text + "[plugins.Second]\non_error = 'allow'\n")
    assert main(["explain"]) == 0
    out = capsys.readouterr().out
    assert out.index("First") < out.index("Second")
    assert "up/x" in out
    assert "allow" in out


def test_explain_shows_a_long_path_whole(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    url = f"http://127.0.0.1:8000/{'long/' * 30}v1"
    text = CONFIG.replace('type = "gated"', f'type = "openai_compatible"\nbase_url = "{url}"')
    text = text.replace('options = { gate = "gate" }', "")
    (folder / "config.toml").write_text(text)
    assert main(["explain"]) == 0
    out = capsys.readouterr().out
    assert url in re.sub(r"[\s│]", "", out)


def test_explain_names_a_lambda_and_no_timeout_for_a_transform(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "quiet.py").write_text(
        "from plugins.hookspecs import hookimpl\n"
        "@hookimpl\n"
        "def register_transforms(register, settings):\n"
        "    register(lambda request, context: None)\n"
    )
    (folder / "config.toml").write_text(CONFIG.replace("enabled = [", 'enabled = ["quiet.py", '))
    assert main(["explain"]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if "quiet" in line)
    assert [cell.strip() for cell in row.split("│")[1:-1]] == [
        "2 transforms",
        "quiet",
        "<lambda>",
        "block",
        "-",
    ]


def test_no_command_shows_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "check a config and stop" in capsys.readouterr().err


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    assert capsys.readouterr().out.startswith("tidegate ")


@pytest.mark.parametrize("args", [["chat"], ["serve", "--config", "a", "--model", "b"]])
def test_arguments_that_mean_nothing_end_with_2(args: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(args)
    assert caught.value.code == 2


# -- Texts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "path", "name"),
    [
        ("demo", "demo", "smollm2"),
        ("owner/some-model", "hub:owner/some-model", "some-model"),
        ("hub:owner/some-model", "hub:owner/some-model", "some-model"),
        ("dir/model.Q4.gguf", "{cwd}/dir/model.Q4.gguf", "model.Q4"),
        ("dir", "{cwd}/dir", "dir"),
        ('odd "dir"', '{cwd}/odd "dir"', 'odd "dir"'),
    ],
)
def test_a_model_alone_makes_a_whole_config(model: str, path: str, name: str, folder: Path) -> None:
    (folder / "dir").mkdir()
    (folder / 'odd "dir"').mkdir()
    (folder / "dir" / "model.Q4.gguf").write_bytes(b"")
    tables = tomllib.loads(default_config(model))
    assert tables["providers"][0]["path"] == path.format(cwd=folder)
    assert tables["models"] == [{"name": name, "targets": [f"local/{name}"]}]
    assert tables["auth"] == {"mode": "open"}


@pytest.mark.parametrize("model", ["none.gguf", "a/none.gguf", "/no/such/dir", "no such", ""])
def test_a_model_that_is_not_there_is_named(model: str) -> None:
    with pytest.raises(
        ConfigFaults, match=re.escape(f'--model: no such file or folder: "{model}"')
    ):
        default_config(model)


def snippet_body(text: str) -> dict[str, object]:
    quoted = text.partition("-d '")[2].partition("'\n")[0].replace("'\\''", "'")
    return json.loads(quoted)


def test_the_banner_can_be_copied_as_it_is() -> None:
    text = banner(parse(CONFIG.replace('"m"', '"it\'s"')), 1234)
    assert "Tidegate is ready at http://127.0.0.1:1234/v1" in text
    assert snippet_body(text)["model"] == "it's"
    ast.parse(text.partition("<<'EOF'\n")[2].partition("EOF")[0])
    assert "Authorization" not in text


def test_the_banner_asks_for_a_key_where_one_is_needed() -> None:
    keys = '[[auth.keys]]\nname = "a"\nkey = "sk-secret"\n'
    config = parse(CONFIG.replace('"open"', '"keys"') + keys)
    text = banner(config, 1234)
    assert text.count("YOUR_KEY") == 2
    assert "sk-secret" not in text


def test_the_banner_names_an_address_that_can_be_reached() -> None:
    keys = '[[auth.keys]]\nname = "a"\nkey = "k"\n'
    text = CONFIG.replace('"open"', '"keys"').replace("port = 0", 'host = "::"') + keys
    assert "http://[::1]:1234/v1" in banner(parse(text), 1234)


# -- `tidegate serve` as a process ------------------------------------------------------------------------------------


def command(*args: str) -> list[str]:
    return [sys.executable, "-m", "gateway.cli", *args]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}


def refused(*args: str) -> str:
    """What `tidegate serve` says on stderr when it refuses to start."""
    argv = command("serve", *args)
    done = subprocess.run(argv, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    return done.stderr


@pytest.mark.slow
def test_an_occupied_port_is_one_clear_line() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        text = refused("--config", "good.toml", "--port", str(port))
    assert text == (
        f"127.0.0.1:{port}: address already in use (by another program);"
        " choose another: --port or server.port\n"
    )


@pytest.mark.slow
def test_a_data_directory_that_cannot_be_written_is_one_clear_line(folder: Path) -> None:
    (folder / "file").write_text("")
    (folder / "config.toml").write_text(CONFIG + '[store]\ndata_dir = "file/data"\n')
    assert refused() == f'store.data_dir: cannot write "{folder}/file/data": Not a directory\n'


@pytest.mark.slow
def test_a_model_that_is_no_model_is_one_clear_line(folder: Path) -> None:
    (folder / "bad.gguf").write_bytes(os.urandom(1000))
    [line] = refused("--model", "bad.gguf", "--port", "0").splitlines()
    assert "bad.gguf" in line


@contextmanager
def serving(*args: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A running `tidegate serve` and its base URL."""
    with subprocess.Popen(
        command("serve", *args), env=environment(), stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            lines = iter(process.stdout.readline, "")
            ready = next(line for line in lines if line.startswith("Tidegate is ready at "))
            yield process, ready.split()[-1]
        finally:
            process.kill()


def model_names(url: str) -> list[str]:
    with urllib.request.urlopen(f"{url}/models") as answer:
        return [model["id"] for model in json.load(answer)["data"]]


@pytest.mark.slow
def test_serve_starts_answers_and_ends_with_0(folder: Path) -> None:
    with serving("--config", "good.toml", "--workers", "2") as (process, url):
        assert model_names(url) == ["m"]
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 0
    with serving("--config", "good.toml") as (process, url):  # on the same data
        assert model_names(url) == ["m"]
        process.send_signal(signal.SIGINT)
        assert process.wait() == 0


@pytest.mark.slow
def test_a_second_serve_on_the_same_data_is_refused(folder: Path) -> None:
    with serving("--config", "good.toml") as (process, _):
        text = refused("--config", "good.toml")
        assert f"in use by another tidegate (process {process.pid})" in text
        process.send_signal(signal.SIGTERM)
        process.wait()
