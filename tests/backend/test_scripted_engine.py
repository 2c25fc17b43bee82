"""The scripted engine as a provider: worker process, socket, engine, detokenizer, with a script for the model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from backend.client import EngineProvider
from backend.connection import Replica
from backend.launch import socket_path
from backend.options import WorkerSettings
from backend.worker import _new_server
from plugins.errors import InvalidRequest
from plugins.events import (
    Event,
    Finished,
    Message,
    ReasoningDelta,
    Request,
    ResponseFormat,
    Sampling,
    Text,
    TextDelta,
    Tool,
    ToolCallDelta,
    ToolChoice,
    Usage,
)
from plugins.interfaces import Call, ProviderSettings, Runtime, Timeout
from plugins.manager import collect_parts
from tests.backend.scripted_engine import ROOT, ScriptedEngineType
from tests.backend.scripted_worker import load_script
from tests.backend.serve_scripted import PLUGIN, with_plugin
from tests.backend.worker_process import WorkerProcess

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def scripted(
    run_dir: Path, *pieces: dict[str, str], **script: Any
) -> AsyncGenerator[EngineProvider, None]:
    """The worker's whole server on the test's own loop, and a provider that is connected to it."""
    file, socket = run_dir / "script.json", run_dir / "engine.sock"
    file.write_text(json.dumps({"pieces": pieces, **script}))
    server = _new_server(load_script(WorkerSettings("s/0", str(socket), str(file), str(run_dir))))
    listener = await asyncio.get_running_loop().create_unix_server(server.new_session, socket)
    server.engine_thread.start()
    async with connected(socket) as provider:
        yield provider
    listener.close()
    server.close()
    server.engine_thread.join(10)


@asynccontextmanager
async def connected(socket: Path) -> AsyncGenerator[EngineProvider, None]:
    provider = EngineProvider("local", [Replica("local/0", socket)], Timeout())
    await provider.start()
    with anyio.fail_after(30):
        while not provider.ready():
            await anyio.sleep(0.01)
    yield provider
    await provider.aclose()


async def events_of(provider: EngineProvider, request: Request) -> list[Event]:
    return [e async for batch in provider.stream(request, Call("script")) for e in batch]


def chat(**fields: Any) -> Request:
    return Request("r", "chat", "m", [Message("user", [Text("hi")])], **fields)


async def test_a_script_is_said_through_the_real_engine(tmp_path: Path) -> None:
    request = chat(sampling=Sampling(stop=["STOP"]))
    pieces = [{"hex": "f09f"}, {"hex": "9880"}, {"t": "ab ST"}, {"t": "OP c"}]
    async with scripted(tmp_path, *pieces) as provider:
        events = await events_of(provider, request)
    assert text_of(events) == "😀ab "
    assert [e for e in events if isinstance(e, Finished)] == [Finished("stop", 0, "STOP")]


async def test_the_worker_process_says_its_script(tmp_path: Path) -> None:
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"pieces": [{"t": "fine"}]}))
    settings = ProviderSettings("s", "scripted_engine", options={"script": str(script)})
    (spec,) = ScriptedEngineType().processes(settings, runtime := Runtime(tmp_path, tmp_path))
    socket = socket_path("s", runtime, 0)
    process = WorkerProcess(tmp_path, argv=spec.argv, stdin=spec.stdin, socket_path=socket)
    try:
        await anyio.to_thread.run_sync(process.wait_ready)
        async with connected(socket) as provider:
            assert text_of(await events_of(provider, chat())) == "fine"
    finally:
        process.kill()


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
    async with scripted(tmp_path, {"t": "Sure! Here"}, {"t": " is your JSON"}) as provider:
        events = await events_of(provider, request)
    for choice in range(2):
        of_choice = [e for e in events if isinstance(e, TextDelta) and e.choice == choice]
        assert json.loads("".join(e.text for e in of_choice)) == {"a": "ja"}
    assert [e.reason for e in events if isinstance(e, Finished)] == ["stop", "stop"]


async def test_a_schema_that_cannot_be_compiled_is_a_refusal_that_names_the_field(
    tmp_path: Path,
) -> None:
    form = ResponseFormat("json_schema", {"$ref": "http://example.com/s"}, "n", strict=True)
    async with scripted(tmp_path, {"t": "x"}) as provider:
        with pytest.raises(InvalidRequest, match=r"example\.com") as refused:
            await events_of(provider, chat(response_format=form))
        assert refused.value.param == "response_format"
        assert text_of(await events_of(provider, chat())) == "x"


LOOK = Tool("look", "Looks.", {"type": "object", "properties": {"a": {"type": "integer"}}})
TOOL_TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools }}"


def calls_of(events: list[Event]) -> list[tuple[str, str]]:
    calls: dict[int, tuple[str, str]] = {}
    for event in events:
        if isinstance(event, ToolCallDelta):
            name, arguments = calls.get(event.index, ("", ""))
            calls[event.index] = name + (event.name or ""), arguments + event.arguments
    return list(calls.values())


async def test_calls_behind_a_special_token_are_found(tmp_path: Path) -> None:
    pieces = [
        {"special": "[TOOL_CALLS]"},
        {"t": '[{"name": "look", "argum'},
        {"t": 'ents": {"a": 1}}]'},
    ]
    async with scripted(tmp_path, *pieces, template="[TOOL_CALLS]" + TOOL_TEMPLATE) as provider:
        events = await events_of(provider, chat(tools=[LOOK]))
    assert calls_of(events) == [("look", '{"a": 1}')]
    assert text_of(events) == ""
    assert [e for e in events if isinstance(e, Finished)] == [Finished("tool_calls", 0)]


async def test_a_call_that_is_cut_says_length(tmp_path: Path) -> None:
    pieces = [{"t": '<tool_call>{"name": "look", "arguments": {"a'}, {"t": '": 1}}'}]
    request = chat(tools=[LOOK], sampling=Sampling(max_tokens=1))
    async with scripted(tmp_path, *pieces, template="<tool_call>" + TOOL_TEMPLATE) as provider:
        events = await events_of(provider, request)
    assert calls_of(events) == [("look", '{"a')]
    assert [e for e in events if isinstance(e, Finished)] == [Finished("length", 0)]


@pytest.mark.parametrize("template", ["{{ messages }}", "[TOOL_CALLS]{{ tools }}", "ipython tools"])
async def test_a_call_that_must_be_made_is_made_whatever_the_model_says(
    tmp_path: Path, template: str
) -> None:
    schema = {"type": "object", "properties": {"a": {"const": 7}}, "required": ["a"]}
    request = chat(
        tools=[Tool("look", None, schema), Tool("go")],
        tool_choice=ToolChoice("named", ["look"]),
        parallel_tool_calls=False,
        sampling=Sampling(temperature=0.0),
    )
    async with scripted(
        tmp_path, {"t": "No!"}, {"special": "[TOOL_CALLS]"}, template=template
    ) as it:
        events = await events_of(it, request)
    ((name, arguments),) = calls_of(events)
    assert (name, json.loads(arguments)) == ("look", {"a": 7})
    assert text_of(events) == ""
    assert [e for e in events if isinstance(e, Finished)] == [Finished("tool_calls", 0)]


async def test_reasoning_is_told_apart_and_counted(tmp_path: Path) -> None:
    pieces = [{"t": "Hm"}, {"t": "."}, {"special": "</think>"}, {"t": "Yes"}, {"t": "!"}]
    template = "{{ messages[0].content }}<think>\n"
    async with scripted(tmp_path, *pieces, template=template) as provider:
        events = await events_of(provider, chat())
        whole = await events_of(provider, chat(extra={"separate_reasoning": False}))
    assert "".join(e.text for e in events if isinstance(e, ReasoningDelta)) == "Hm."
    assert text_of(events) == "Yes!"
    (usage,) = (e for e in events if isinstance(e, Usage))
    assert (usage.completion_tokens, usage.reasoning_tokens) == (6, 3)
    assert text_of(whole) == "Hm.</think>Yes!"


async def test_a_form_holds_for_the_answer_behind_the_reasoning(tmp_path: Path) -> None:
    pieces = [{"t": "Hm {"}, {"t": "</think>"}, {"t": "nonsense"}]
    request = chat(
        response_format=ResponseFormat("regex", pattern="[0-9]{3}"),
        sampling=Sampling(temperature=0.0),
    )
    async with scripted(tmp_path, *pieces, template="<think>") as provider:
        events = await events_of(provider, request)
    assert "".join(e.text for e in events if isinstance(e, ReasoningDelta)) == "Hm {"
    assert text_of(events) == "000"
