"""The scripted engine as a provider: worker process, socket, engine, detokenizer, with a script for the model."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from backend.client import EngineProvider
from backend.connection import Replica
from plugins.errors import InvalidRequest
from plugins.events import (
    Event,
    Finished,
    Message,
    Request,
    ResponseFormat,
    Sampling,
    Text,
    TextDelta,
)
from plugins.interfaces import Call, Timeout
from plugins.manager import collect_parts
from tests.backend.scripted_engine import ROOT
from tests.backend.serve_scripted import PLUGIN, with_plugin
from tests.backend.worker_process import WorkerProcess

pytestmark = pytest.mark.anyio
WORKER = (sys.executable, "-m", "tests.backend.scripted_worker")


@contextmanager
def scripted(run_dir: Path, *pieces: dict[str, str], **script: Any) -> Iterator[EngineProvider]:
    file = run_dir / "script.json"
    file.write_text(json.dumps({"pieces": pieces, **script}))
    process = WorkerProcess(run_dir, argv=WORKER, model_path=str(file))
    try:
        process.wait_ready()
        yield EngineProvider("local", [Replica("local/0", process.socket_path)], Timeout())
    finally:
        process.kill()


async def events_of(provider: EngineProvider, request: Request) -> list[Event]:
    import anyio

    await provider.start()
    try:
        with anyio.fail_after(30):
            while not provider.ready():
                await anyio.sleep(0.01)
            return [e async for batch in provider.stream(request, Call("script")) for e in batch]
    finally:
        await provider.aclose()


def chat(**fields: Any) -> Request:
    return Request("r", "chat", "m", [Message("user", [Text("hi")])], **fields)


async def test_a_script_is_said_through_the_real_engine(tmp_path: Path) -> None:
    request = chat(sampling=Sampling(stop=["STOP"]))
    with scripted(tmp_path, {"hex": "f09f"}, {"hex": "9880"}, {"t": "ab ST"}, {"t": "OP c"}) as it:
        events = await events_of(it, request)
    assert text_of(events) == "😀ab "
    assert [e for e in events if isinstance(e, Finished)] == [Finished("stop", 0, "STOP")]


def test_the_plugin_brings_the_provider_type() -> None:
    assert "scripted_engine" in collect_parts([str(PLUGIN)], {}, ROOT).provider_types


def test_a_config_gets_the_plugin_in_a_copy(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text("[server]\nport = 1\n")
    assert str(PLUGIN) in with_plugin(config).read_text()
    assert str(PLUGIN) not in config.read_text()


def text_of(events: list[Event]) -> str:
    return "".join(e.text for e in events if isinstance(e, TextDelta))


async def test_a_response_format_holds_whatever_the_model_says(tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"a": {"const": "ja"}}, "required": ["a"]}
    form = ResponseFormat("json_schema", {**schema, "additionalProperties": False}, "n")
    request = chat(response_format=form, sampling=Sampling(n=2, temperature=0.0))
    with scripted(tmp_path, {"t": "Sure! Here"}, {"t": " is your JSON"}) as provider:
        events = await events_of(provider, request)
    for choice in range(2):
        of_choice = [e for e in events if isinstance(e, TextDelta) and e.choice == choice]
        assert json.loads("".join(e.text for e in of_choice)) == {"a": "ja"}
    assert [e.reason for e in events if isinstance(e, Finished)] == ["stop", "stop"]


async def test_a_schema_that_cannot_be_compiled_is_a_refusal_that_names_the_field(
    tmp_path: Path,
) -> None:
    form = ResponseFormat("json_schema", {"$ref": "http://example.com/s"}, "n", strict=True)
    with scripted(tmp_path, {"t": "x"}) as provider:
        with pytest.raises(InvalidRequest, match=r"example\.com") as refused:
            await events_of(provider, chat(response_format=form))
        assert refused.value.param == "response_format"
        assert text_of(await events_of(provider, chat())) == "x"
