"""One sample of gateway_overhead.py: drive a load tool against a target and watch what the gateway spends meanwhile."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench_server import Server
from process_meter import cpu_s, machine_busy_s, rss_mb

HERE = Path(__file__).resolve().parent
PYTHON_LOAD_TOOL = [sys.executable, str(HERE / "load_generator.py")]
PYTHON_MOCK_TOOL = [sys.executable, str(HERE / "fake_upstream.py")]
STAMP_TAIL_S = 0.15  # the window of CPU accounting ends so long before the load tool does


@dataclass(frozen=True)
class Case:
    title: str
    arguments: tuple[str, ...]
    warm_s: float = 0.5
    streams: bool = False


def _stream(concurrency: int) -> Case:
    spread = (
        () if concurrency == 1 else ("-j", "1.28")
    )  # out of step: one whole stream takes 1.28 s
    arguments = ("-s", "-c", str(concurrency), "-k", "64", "-D", "20000", *spread)
    return Case(f"64 chunks, one each 20 ms, c={concurrency}", arguments, 1.6, streams=True)


CASES = {
    "c1": Case("1.1 kB, c=1", ("-c", "1")),
    "c64": Case("1.1 kB, c=64", ("-c", "64"), 1.0),
    "body100k": Case("100 kB request, c=16", ("-c", "16", "-B", "100000")),
    "stream1": _stream(1),
    "stream16": _stream(16),
    "stream128": _stream(128),
}
Sample = dict[str, Any]


@dataclass(frozen=True)
class LoadTool:
    command: list[str]
    core: int | None
    duration_s: float
    upstream_pid: int

    def run(self, target: Server, case: Case) -> Sample:
        """What the tool prints, with `cpu_us` per request or chunk, `rss_mb` and `foreign`: cores used by others."""
        pin = [] if self.core is None else ["taskset", "-c", str(self.core)]
        command = [*pin, *self.command, "-u", f"127.0.0.1:{target.port}"]
        command += ["-m", target.model, *case.arguments]
        command += ["-d", f"{self.duration_s:g}", "-w", f"{case.warm_s:g}"]
        for header in target.headers:
            command += ["-H", header]
        pids = target.pids
        tool = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        tools = [self.upstream_pid, tool.pid]
        time.sleep(case.warm_s)
        begin = _Reading.take(pids, tools)
        time.sleep(self.duration_s - STAMP_TAIL_S)
        end = _Reading.take(pids, tools)
        memory_mb = rss_mb(pids)
        text, _ = tool.communicate(timeout=120)
        sample: Sample = json.loads(text)
        wall_s = end.at_s - begin.at_s
        own_s = end.target_s - begin.target_s
        tools_s = end.tools_s - begin.tools_s
        units = sample["chunks"] if case.streams else sample["done"]
        own_cores = own_s / wall_s
        sample["cpu_us"] = own_cores * sample["wall_s"] / units * 1e6 if units else None
        sample["foreign"] = max(0.0, (end.busy_s - begin.busy_s - own_s - tools_s) / wall_s)
        return sample | {"gateway_cores": own_cores, "rss_mb": memory_mb}


@dataclass(frozen=True)
class _Reading:
    at_s: float
    target_s: float
    tools_s: float
    busy_s: float

    @classmethod
    def take(cls, target: list[int], tools: list[int]) -> _Reading:
        return cls(time.monotonic(), cpu_s(target), cpu_s(tools), machine_busy_s())
