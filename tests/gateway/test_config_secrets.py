from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from plugins.interfaces import Limits
from tests.gateway.config_texts import GOOD, MODEL, PROVIDER, SERVER, faults, parse


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def with_key(key: str) -> str:
    return f'{GOOD}[[auth.keys]]\nname = "web"\nkey = {key}\n'


def key_digest(text: str) -> bytes:
    return parse(text).auth.keys[0].key.sha256


def test_a_key_is_kept_as_its_digest_whatever_its_source(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEB_KEY", "sk-1")
    (folder / "key.txt").write_bytes(b"sk-1\r\n")
    digest = hashlib.sha256(b"sk-1")
    sources = ('"sk-1"', '{ env = "WEB_KEY" }', '{ file = "key.txt" }')
    for source in (*sources, f'{{ sha256 = "{digest.hexdigest().upper()}" }}'):
        assert key_digest(with_key(source)) == digest.digest()


def test_no_secret_shows_in_the_config_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UP_KEY", "sk-upstream")
    text = PROVIDER + 'api_key = { env = "UP_KEY" }\nheaders = { X-A = "sk-header" }\n'
    config = parse(SERVER.strip() + '\nadmin_key = "sk-admin"\n' + text + MODEL)
    settings = config.providers[0]
    assert settings.api_key is not None
    assert settings.api_key.reveal() == "sk-upstream"
    assert settings.headers["X-A"].reveal() == "sk-header"
    assert config.auth.admin_key is not None
    shown = repr(config)
    assert "sk-" not in shown


SECRET_FAULTS = [
    ('{ env = "NOT_SET" }', "key: environment variable NOT_SET is not set"),
    ('{ env = "EMPTY" }', "key: environment variable EMPTY is empty"),
    ('{ env = "TWO_LINES" }', "key: environment variable TWO_LINES has a line break"),
    ('{ env = "" }', "key.env: must be a string that is not empty"),
    ("{ env = 3 }", "key.env: must be a string that is not empty"),
    ('{ evn = "X" }', "key.evn: unknown key; nearest: env"),
    ('{ file = "none.txt" }', "key: file none.txt: No such file or directory"),
    ('{ file = "." }', "key: file .: Is a directory"),
    ('{ file = "empty.txt" }', "key: file empty.txt is empty"),
    ('{ file = "binary.txt" }', "key: file binary.txt: is not UTF-8 text"),
    ('{ env = "EMPTY", file = "empty.txt" }', "key: must be a string or exactly one of {"),
    ("{}", "key: must be a string or exactly one of {"),
    ("12345", "key: must be a string or one of {"),
    ('""', "key: the value is empty"),
    ('{ sha256 = "abc" }', "key.sha256: must be 64 hex digits"),
]


@pytest.mark.parametrize(("secret", "message"), SECRET_FAULTS)
def test_a_secret_that_cannot_be_had_is_named_and_never_shown(
    secret: str, message: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EMPTY", "")
    monkeypatch.setenv("TWO_LINES", "sk-1\nsk-2")
    monkeypatch.delenv("NOT_SET", raising=False)
    (folder / "empty.txt").write_bytes(b"\n")
    (folder / "binary.txt").write_bytes(b"\xff\xfe")
    [line] = faults(with_key(secret))
    assert line.startswith(f"config.toml:12: auth.keys[0].{message}")
    assert "sk-" not in line
    assert "12345" not in line


def test_a_secret_beside_a_fault_is_not_shown() -> None:
    text = GOOD + 'api_key = "sk-live-123"\napi_bse = "sk-live-123"\n'
    assert "sk-live-123" not in "".join(faults(text))


def test_a_secret_where_a_number_belongs_is_not_shown() -> None:
    assert "sk-live" not in "".join(faults(f'{GOOD}[queue]\nmax_waiting = "sk-live-123"\n'))


# -- Keys -------------------------------------------------------------------------------------------------------------


def test_a_key_may_have_models_and_limits() -> None:
    text = with_key('"k"') + 'models = ["m"]\nlimits = { rpm = 3, budget_window = "never" }\n'
    key = parse(text).auth.keys[0]
    assert (key.models, key.limits) == (("m",), Limits(rpm=3, budget_window="never"))


KEY_FAULTS = [
    ('models = ["x"]', 'models[0]: no model "x"; nearest: m'),
    ("models = []", "models: expected a list of length >= 1"),
    ("limits = { rpm = 0 }", "limits.rpm: expected an integer >= 1"),
    ("limits = { rpm = 1.5 }", "limits.rpm: expected an integer, got a number"),
    ("limits = { rps = 1 }", "limits.rps: unknown key; nearest: rpm"),
    ('limits = { budget_window = "week" }', 'limits.budget_window: must be one of "day", "month",'),
]


@pytest.mark.parametrize(("text", "message"), KEY_FAULTS)
def test_a_fault_in_a_key_is_refused(text: str, message: str) -> None:
    [line] = faults(f"{with_key(chr(34) + 'k' + chr(34))}{text}\n")
    assert line.startswith(f"config.toml:13: auth.keys[0].{message}")
