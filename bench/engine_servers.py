"""The servers that engine_serving.py compares, each as its makers start it for many streams on a CPU."""

from __future__ import annotations

import json
import shlex
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench_server import Server, free_port, tidegate_server


@dataclass
class Contender:
    server: Server
    may_pause: bool  # no supervisor of its own would notice
    extra: dict[str, Any] = field(default_factory=dict)  # added to each request


# An answer of the wanted length, whatever the model says; not every server knows this.
_FULL_LENGTH: dict[str, Any] = {"ignore_eos": True, "stream_options": {"include_usage": True}}


def tidegate(scratch: Path, model: Path, threads: int, options: str) -> Contender:
    table = ", ".join(part for part in (f"threads = {threads}", options) if part)
    folder = scratch / f"tidegate {options}".replace("/", " ").strip()
    folder.mkdir()
    server = tidegate_server(
        folder,
        f'[[providers]]\nname = "local"\ntype = "engine"\npath = "{model}"\nengine = {{ {table} }}\n'
        '[[models]]\nname = "bench"\ntargets = ["local/bench"]\n',
    )
    server.name = folder.name
    return Contender(server, may_pause=False, extra=_FULL_LENGTH)


def llama_server(
    scratch: Path, command: str, model: Path, threads: int, *, slots: int, slot_tokens: int
) -> Contender:
    """Its slots share the context evenly, so it is given enough for all of them."""
    port = free_port()
    options = ["-m", str(model), "-t", str(threads), "-np", str(slots)]
    options += ["-c", str(slots * slot_tokens), "--host", "127.0.0.1"]
    name = f"llama.cpp {model.stem.rsplit('.', 1)[-1]}"
    server = Server(
        name=name,
        command=[*shlex.split(command), *options, "--port", str(port)],
        port=port,
        log=scratch / f"{name}.log",
        ready_path="/health",
    )
    return Contender(server, may_pause=True, extra=_FULL_LENGTH)


def transformers(scratch: Path, command: str, folder: Path, threads: int, dtype: str) -> Contender:
    """`transformers serve` with continuous batching; 128 blocks of 256 tokens are 1-2 GB.

    It refuses `ignore_eos`, so answers may be shorter.
    """
    port = free_port()
    options = ["--continuous-batching", "--cb-num-blocks", "128", "--device", "cpu"]
    options += ["--dtype", dtype, "--host", "127.0.0.1", "--port", str(port)]
    server = Server(
        name=f"transformers {dtype}",
        command=[*shlex.split(command), "serve", str(folder), *options],
        port=port,
        log=scratch / f"transformers {dtype}.log",
        ready_path="/health",
        env={"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"},
    )
    return Contender(server, may_pause=True)


def served_model(server: Server) -> str:
    """The first name in its list of models."""
    request = urllib.request.Request(f"http://127.0.0.1:{server.port}/v1/models")
    for header in server.headers:
        name, _, value = header.partition(": ")
        request.add_header(name, value)
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as answer:
        return json.load(answer)["data"][0]["id"]
