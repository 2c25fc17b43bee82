from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from backend import launch
from backend.client import EngineType
from backend.models.errors import DemoModelUnavailable
from backend.options import EngineOptions, WorkerSettings
from backend.protocol import FrameReader
from plugins.errors import GatewayError
from plugins.interfaces import ProcessSpec, ProviderSettings, Runtime
from plugins.secrets import Secret

DEMO = ProviderSettings("local", "engine", path="demo")


def faults(path: str = "demo", **fields: Any) -> list[str]:
    return EngineType().check(replace(DEMO, path=path, **fields))


def worker_settings(spec: ProcessSpec) -> WorkerSettings:
    (payload,) = FrameReader().feed(spec.stdin)
    return msgspec.msgpack.decode(payload, type=WorkerSettings)


@pytest.fixture
def runtime(tmp_path: Path) -> Runtime:
    return Runtime(tmp_path / "data", tmp_path)


@pytest.mark.parametrize("path", ["demo", "hub:owner/name-1.5"])
def test_a_model_to_be_fetched_has_no_fault_yet(path: str) -> None:
    assert faults(path) == []


def test_a_path_is_required() -> None:
    (fault,) = faults("")
    assert fault.startswith("path: required")


def test_a_missing_path_is_named() -> None:
    assert faults("/no/such/model") == ["path: /no/such/model: no such file or folder"]


def test_a_malformed_hub_name_is_named() -> None:
    assert faults("hub:just-a-name") == ['path: hub:just-a-name: expected "hub:owner/name"']


def test_a_file_of_another_kind_is_named(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"PK\3\4")
    assert faults(str(file)) == [f"path: {file}: not a GGUF file"]


def test_an_empty_file_is_no_model(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.touch()
    assert faults(str(file)) == [f"path: {file}: not a GGUF file"]


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    (fault,) = faults(str(tmp_path))
    assert fault.startswith(f"path: {tmp_path}: neither")


def test_a_folder_with_a_config_passes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert faults(str(tmp_path)) == []


def test_a_missing_template_is_named() -> None:
    assert faults(template="/no/t.jinja") == ["template: /no/t.jinja: no such file"]


def test_faults_of_the_engine_table_are_told() -> None:
    assert faults(engine={"dtpe": "x"}) == ["engine.dtpe: unknown key; nearest: dtype"]


def test_a_draft_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    def told(draft: str) -> list[str]:
        return faults(engine={"speculative": f"draft:{draft}"})

    assert told("/no/such") == ["engine.speculative: /no/such: no such file or folder"]
    assert told("hub:a/b") == [
        "engine.speculative: hub:a/b: a draft model is a folder or a .gguf file"
    ]
    (tmp_path / "config.json").write_text("{}")
    assert told(str(tmp_path)) == []


def test_a_draft_head_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert faults(engine={"speculative": "head:/no/such"}) == [
        "engine.speculative: /no/such: no such file or folder"
    ]
    assert faults(engine={"speculative": f"head:{tmp_path}"}) == []


@pytest.mark.parametrize(
    "fields", [{"base_url": "http://x"}, {"api_key": Secret("s3cret")}, {"options": {"a": 1}}]
)
def test_keys_of_remote_providers_are_refused(fields: dict[str, Any]) -> None:
    (key,) = fields
    assert faults(**fields) == [f"{key}: not used by type engine"]


def test_without_the_extra_the_fault_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "torch" else find_spec(name)
    )
    (fault,) = faults()
    assert fault.startswith(
        "type: \"engine\" needs the backend extra: pip install 'tidegate[backend]'"
    )


def test_each_replica_has_a_process_a_socket_and_its_share_of_the_cpus(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_num_cpus", lambda: 8)
    specs = EngineType().processes(replace(DEMO, engine={"replicas": 2}), runtime)
    settings = [worker_settings(spec) for spec in specs]
    assert [s.name for s in settings] == ["local/0", "local/1"]
    assert [Path(s.socket_path).name for s in settings] == [
        "engine-local-0.sock",
        "engine-local-1.sock",
    ]
    assert [spec.env["OMP_NUM_THREADS"] for spec in specs] == ["4", "4"]


def test_threads_are_what_the_table_says(runtime: Runtime) -> None:
    (spec,) = EngineType().processes(replace(DEMO, engine={"threads": 3}), runtime)
    assert (spec.env["OMP_NUM_THREADS"], worker_settings(spec).threads) == ("3", 3)


def test_the_worker_learns_path_template_and_options(runtime: Runtime) -> None:
    provider = replace(DEMO, path="/m.gguf", template="/t.jinja", engine={"dtype": "float32"})
    (spec,) = EngineType().processes(provider, runtime)
    settings = worker_settings(spec)
    assert (settings.model_path, settings.template) == ("/m.gguf", "/t.jinja")
    assert settings.options == EngineOptions(dtype="float32")
    assert spec.argv == (sys.executable, "-m", "backend.worker")


@pytest.mark.parametrize("name", ["a" * 200, "two words", "\u00fcber", "../up"])
def test_any_provider_name_makes_a_short_plain_socket_name(name: str, runtime: Runtime) -> None:
    path = launch.socket_path(name, runtime, 0)
    assert path.parent == runtime.run_dir
    assert path.name.isascii()
    assert len(path.name) < 40


def test_different_names_never_share_a_socket(runtime: Runtime) -> None:
    names = ["a b", "a  b", "a" * 30, "a" * 31]
    assert len({launch.socket_path(name, runtime, 0) for name in names}) == len(names)


def test_a_demo_model_that_cannot_be_fetched_refuses_the_start(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fetch(data_dir: Path, progress: object) -> None:
        raise DemoModelUnavailable("the demo model cannot be fetched: no network")

    monkeypatch.setattr(launch, "fetch_demo_model", fetch)
    with pytest.raises(GatewayError, match=r"providers\.local: the demo model cannot be fetched"):
        EngineType().prepare(DEMO, runtime)


def test_progress_is_shown_on_standard_error_only_when_something_is_fetched(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch, "fetch_demo_model", lambda data_dir, progress: progress(1, 2))
    EngineType().prepare(DEMO, runtime)
    shown = capsys.readouterr()
    assert ("fetching the demo model" in shown.err, shown.out) == (True, "")
    monkeypatch.setattr(launch, "fetch_demo_model", lambda data_dir, progress: None)
    EngineType().prepare(DEMO, runtime)
    assert capsys.readouterr().err == ""


def test_a_local_path_needs_no_preparing(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(launch, "fetch_demo_model")
    monkeypatch.delattr(launch, "fetch_hub_model")
    EngineType().prepare(replace(DEMO, path="/m.gguf"), runtime)
