from __future__ import annotations

from pathlib import Path

import pytest

from gateway.config import ConfigFaults, load_config, parse_config
from plugins.interfaces import Breaker, Timeout
from tests.gateway.config_texts import GOOD, MODEL, PROVIDER, SERVER, faults, parse


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_small_config_gets_the_documented_defaults(folder: Path) -> None:
    config = parse(GOOD)
    assert (config.server.host, config.server.port, config.server.workers) == ("127.0.0.1", 8080, 1)
    assert config.store.data_dir == folder / "data"
    assert config.providers[0].timeout == Timeout(5, 120, 60, 900)
    assert config.providers[0].breaker == Breaker(5, 10)
    assert config.models[0].targets == ("up/x",)
    assert config.queue.max_waiting == 1000
    assert "engine" in config.parts.provider_types


UNKNOWN_KEYS = [
    (GOOD + 'api_bse = "x"\n', "config.toml:10: models[0].api_bse: unknown key; nearest: targets"),
    (GOOD + "[modles]\n", "config.toml:10: modles: unknown table; nearest: models"),
    ("modles = []\n" + GOOD, "config.toml:1: modles: unknown table; nearest: models"),
    ("prot = 1\n" + GOOD, "config.toml:1: prot: unknown key; nearest: store"),
    (GOOD + "[server]\nprot = 1\n", "config.toml:11: server.prot: unknown key; nearest: port"),
    (
        GOOD + "[[models]]\nname = 'n'\ntargets = ['up/x']\ncache = { mode = 'off', tll_s = 3 }\n",
        "config.toml:13: models[1].cache.tll_s: unknown key; nearest: ttl_s",
    ),
    (
        GOOD
        + "[[providers]]\nname='p2'\ntype='engine'\npath='demo'\n[providers.timeout]\nide_s=3\n",
        "config.toml:15: providers[1].timeout.ide_s: unknown key; nearest: idle_s",
    ),
    (
        GOOD + "[plugins]\nenable = []\n",
        "config.toml:11: plugins.enable: unknown key; nearest: enabled",
    ),
]


@pytest.mark.parametrize(("text", "line"), UNKNOWN_KEYS)
def test_an_unknown_key_is_refused_with_its_line_and_the_nearest_known_one(
    text: str, line: str
) -> None:
    assert faults(text) == [line]


WRONG_VALUES = [
    ("[server]\nport = 'eighty'", "server.port: expected an integer, got a string"),
    ("[server]\nport = 65536", "server.port: expected an integer <= 65535"),
    ("[server]\nport = true", "server.port: expected an integer, got true or false"),
    ("[server]\nworkers = 0", "server.workers: expected an integer >= 1"),
    ("[server]\nhost = ''", "server.host: expected a string of length >= 1"),
    ("[server]\nshutdown_grace_s = -1", "server.shutdown_grace_s: expected a number >= 0.0"),
    ("[server]\nshutdown_grace_s = nan", "server.shutdown_grace_s: must be a finite number"),
    ("[server]\ncors_origins = 'x'", "server.cors_origins: expected a list, got a string"),
    (
        "[server]\ncors_origins = ['*', 3]",
        "server.cors_origins[1]: expected a string, got an integer",
    ),
    (
        "[server]\ncors_origins = ['example.com']",
        'server.cors_origins[0]: must be "*" or an origin such as "https://example.com"',
    ),
    ("[store]\ntimeout_ms = inf", "store.timeout_ms: must be a finite number"),
    ("[store]\ndata_dir = 3", "store.data_dir: expected a string, got an integer"),
    ("[store]\nurl = 'http://x'", "store.url: must begin with redis://, rediss:// or unix://"),
    (
        "[store]\non_limits_failure = 'opne'",
        'store.on_limits_failure: must be one of "local", "open", "closed"; got "opne"',
    ),
    ("[queue]\nmax_wait_s = 0", "queue.max_wait_s: expected a number > 0.0"),
    ("[telemetry]\nmetrics = 1", "telemetry.metrics: expected true or false, got an integer"),
    ("[telemetry]\nlog_level = 2024-01-01", 'telemetry.log_level: must be one of "debug", "info",'),
    (
        "[[prices]]\ntarget = 'a/b'\ninput = -1\noutput = 1",
        "prices[0].input: expected a number >= 0.0",
    ),
    ("[[prices]]\ntarget = 'a/b'\ninput = 1", "prices[0].output: required"),
    ("[prices]\na = 1", "prices: must be a list of tables, got a table"),
    ("[[queue]]\na = 1", "queue: must be a table, got a list"),
]


@pytest.mark.parametrize(("text", "message"), WRONG_VALUES)
def test_a_wrong_type_or_range_is_refused_by_key(text: str, message: str) -> None:
    [line] = faults(f"{GOOD}{text}\n")
    place, _, rest = line.partition(": ")
    assert rest.startswith(message)
    assert 10 <= int(place.removeprefix("config.toml:")) <= 13


IN_PROVIDER = [
    ("timeout = { connect_s = -1 }", "providers[0].timeout.connect_s: expected a number > 0.0"),
    ("timeout = 5", "providers[0].timeout: must be a table, got an integer"),
    ("max_retries = 11", "providers[0].max_retries: expected an integer <= 10"),
    ("breaker = { failures = -1 }", "providers[0].breaker.failures: expected an integer >= 0"),
    ("headers = 'x'", "providers[0].headers: must be a table, got a string"),
    (
        "path = 'x'",
        'providers[0].path: a provider of type "openai_compatible" does not take this key',
    ),
    (
        "engine = {}",
        'providers[0].engine: a provider of type "openai_compatible" does not take this key',
    ),
]


@pytest.mark.parametrize(("text", "message"), IN_PROVIDER)
def test_a_fault_in_a_provider_is_refused_by_key(text: str, message: str) -> None:
    lines = faults(SERVER + PROVIDER + text + "\n" + MODEL)
    assert lines[0] == f"config.toml:7: {message}"


@pytest.mark.parametrize(
    "url", ["h/v1", "ftp://h", "http://", "http://h:port", "http://user:pw@h", "http://h/v1?key=1"]
)
def test_a_base_url_that_is_none_is_refused_without_being_shown(url: str) -> None:
    [line] = faults(GOOD.replace("http://h/v1", url))
    assert line.startswith("config.toml:6: providers[0].base_url: must be http://HOST")
    assert url not in line.replace("http://HOST", "")


def test_the_slash_at_the_end_of_base_url_does_not_matter() -> None:
    assert parse(GOOD.replace("/v1", "/v1/")).providers == parse(GOOD).providers


TARGETS = [
    ('["ghost/x"]', 'models[0].targets[0]: no provider "ghost"; nearest: up'),
    ('["up/x", "ghost/y"]', 'models[0].targets[1]: no provider "ghost"; nearest: up'),
    ('["up"]', 'models[0].targets[0]: must be "provider/upstream model name", got "up"'),
    ('["up/"]', 'models[0].targets[0]: must be "provider/upstream model name", got "up/"'),
    ('["/x"]', 'models[0].targets[0]: must be "provider/upstream model name", got "/x"'),
    ('["up/x", "up/y", "up/x"]', 'models[0].targets[2]: "up/x" is given twice'),
    ("[]", "models[0].targets: expected a list of length >= 1"),
]


@pytest.mark.parametrize(("targets", "message"), TARGETS)
def test_a_target_that_leads_nowhere_is_refused(targets: str, message: str) -> None:
    assert faults(GOOD.replace('["up/x"]', targets)) == [f"config.toml:9: {message}"]


def test_a_target_is_split_at_its_first_slash() -> None:
    assert parse(GOOD.replace("up/x", "up/org/model")).models[0].targets == ("up/org/model",)


DOUBLES = [
    (GOOD + MODEL, 'config.toml:11: models[1].name: "m" is given twice'),
    (GOOD + PROVIDER, 'config.toml:11: providers[1].name: "up" is given twice'),
    (
        GOOD + "[[prices]]\ntarget = 'a/b'\ninput = 1\noutput = 1\n" * 2,
        'config.toml:15: prices[1].target: "a/b" is given twice',
    ),
    (
        GOOD + '[[auth.keys]]\nname = "a"\nkey = "k1"\n[[auth.keys]]\nname = "a"\nkey = "k2"\n',
        'config.toml:14: auth.keys[1].name: "a" is given twice',
    ),
    (
        GOOD + '[[auth.keys]]\nname = "a"\nkey = "k1"\n[[auth.keys]]\nname = "b"\nkey = "k1"\n',
        "config.toml:15: auth.keys[1].key: is the key of another entry too",
    ),
]


@pytest.mark.parametrize(("text", "line"), DOUBLES)
def test_what_must_be_unique_is_refused_when_given_twice(text: str, line: str) -> None:
    assert faults(text) == [line]


def test_a_key_in_a_table_twice_is_refused_with_its_line() -> None:
    [line] = faults('[[models]]\nname = "m1"\nname = "m2"\n')
    assert line.startswith("config.toml:3: not valid TOML: ")


BROKEN = [
    ('[[models]\nname = "m1"\n', "config.toml:1: not valid TOML: "),
    ('x = 1\ny = "open\n', "config.toml:2: not valid TOML: "),
    ("x = [1,\n2,\n", "config.toml:3: not valid TOML: "),
    ("x = " + "9" * 5000, "config.toml: not valid TOML: "),
    ("x = " + "[" * 100_000, "config.toml: is nested too deeply"),
]


@pytest.mark.parametrize(("text", "beginning"), BROKEN, ids=range(len(BROKEN)))
def test_text_that_is_not_toml_is_refused_with_its_line(text: str, beginning: str) -> None:
    [line] = faults(text)
    assert line.startswith(beginning)


def test_an_empty_file_is_told_what_is_missing() -> None:
    assert faults("") == [
        'config.toml: auth.keys: mode is "keys", but there is no key: add [[auth.keys]]',
        "config.toml: models: at least one model is needed: add [[models]]",
    ]


def test_a_file_that_is_not_utf8_is_refused_with_its_line(folder: Path) -> None:
    (folder / "config.toml").write_bytes(b"[server]\nhost = '\xff'\n")
    with pytest.raises(ConfigFaults, match=r"config\.toml:2: is not UTF-8 text"):
        load_config(Path("config.toml"))


@pytest.mark.parametrize(
    ("name", "reason"), [("none.toml", "No such file or directory"), (".", "Is a directory")]
)
def test_a_file_that_cannot_be_read_is_named(name: str, reason: str) -> None:
    with pytest.raises(ConfigFaults, match=reason):
        load_config(Path(name))


def test_a_byte_order_mark_is_skipped(folder: Path) -> None:
    (folder / "config.toml").write_bytes(b"\xef\xbb\xbf" + GOOD.encode())
    assert load_config(Path("config.toml")).models[0].name == "m"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_open_mode_is_accepted_on_a_loopback_host(host: str) -> None:
    assert parse(f'{GOOD}[server]\nhost = "{host}"\n').server.host == host


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.4", "gateway.example"])
def test_open_mode_on_a_host_that_others_reach_is_refused(host: str) -> None:
    [line] = faults(f'{GOOD}[server]\nhost = "{host}"\n')
    assert line.startswith('config.toml:2: auth.mode: "open" is for a loopback host only')
    assert host in line


def test_open_mode_is_checked_against_the_host_of_the_command_line() -> None:
    with pytest.raises(ConfigFaults, match="loopback"):
        parse_config(GOOD, Path("config.toml"), {"server": {"host": "0.0.0.0"}})


def test_values_of_the_command_line_replace_those_of_the_file() -> None:
    text = f"{GOOD}[server]\nport = 1\nworkers = 2\n"
    server = parse_config(text, Path("config.toml"), {"server": {"port": 9}}).server
    assert (server.port, server.workers) == (9, 2)


def test_mode_keys_without_a_key_is_refused() -> None:
    [line] = faults(GOOD.replace('"open"', '"keys"'))
    assert (
        line == 'config.toml:1: auth.keys: mode is "keys", but there is no key: add [[auth.keys]]'
    )


def test_a_config_without_models_is_refused() -> None:
    assert faults(SERVER + PROVIDER) == [
        "config.toml: models: at least one model is needed: add [[models]]"
    ]


# -- What is not built yet --------------------------------------------------------------------------------------------

UNBUILT = [
    ("policy = 'cheapest'", 'models[0].policy: "cheapest" is not built yet; use "ordered"'),
    ("policy = 'fastest'", 'models[0].policy: "fastest" is not built yet; use "ordered"'),
    (
        "policy = 'slo'\nslo = { ttft_ms = 300 }",
        'models[0].policy: "slo" is not built yet; use "ordered"',
    ),
    (
        "[telemetry]\notlp_endpoint = 'http://h'",
        'telemetry.otlp_endpoint: "http://h" is not built yet; leave it out',
    ),
    ("cache = { mode = 'exact' }", 'models[0].cache.mode: "exact" is not built yet; use "off"'),
    (
        "[[auth.keys]]\nname = 'a'\nkey = 'k'\nlimits = { budget_usd = 3.5 }",
        "auth.keys[0].limits.budget_usd: 3.5 is not built yet; leave it out",
    ),
    (
        "[[auth.keys]]\nname = 'a'\nkey = 'k'\nlimits = { budget_window = 'day' }",
        'auth.keys[0].limits.budget_window: "day" is not built yet; use "never"',
    ),
    (
        "[store]\non_limits_failure = 'closed'",
        'store.on_limits_failure: "closed" is not built yet; use "local"',
    ),
]


@pytest.mark.parametrize(("text", "message"), UNBUILT)
def test_what_is_not_built_yet_is_refused_and_not_ignored(text: str, message: str) -> None:
    [line] = faults(f"{GOOD}{text}\n")
    assert line.endswith(message)


def test_policy_slo_needs_an_objective() -> None:
    lines = faults(GOOD + "policy = 'slo'\n")
    assert any('models[0].slo: policy = "slo" needs ttft_ms, tpot_ms or both' in x for x in lines)


def test_an_unknown_policy_is_named() -> None:
    [line] = faults(GOOD + "policy = 'cheepest'\n")
    assert line.endswith('got "cheepest"')


def test_all_faults_are_told_at_once_in_the_order_of_the_file() -> None:
    text = GOOD + "policy = 'x'\n[server]\nport = -1\nprot = 2\n[[models]]\ntargets = ['ghost/x']\n"
    assert [line.split(": ")[:2] for line in faults(text)] == [
        ["config.toml:10", "models[0].policy"],
        ["config.toml:12", "server.port"],
        ["config.toml:13", "server.prot"],
        ["config.toml:14", "models[1].name"],
    ]
