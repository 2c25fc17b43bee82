"""What the gateway adds to a request: latency, CPU, memory; beside a direct call and, by flag, LiteLLM.

    python bench/gateway_overhead.py [--rounds 3] [--cases c1,c64,...] [--litellm /path/to/litellm]
        [--load-tool PATH --mock-tool PATH] [--out samples.jsonl]
    python bench/gateway_overhead.py --report samples.jsonl

The gateway and its store are pinned to one core, fake upstream and load generator to the other. Tidegate checks a key
and writes a usage row for each request; the rows are counted at the end. Targets take turns within each case, and the
order rotates from round to round. A sample during which other programs used more than --max-foreign cores is repeated,
up to --retries times, and the least disturbed one is kept: chosen by foreign load, never by its result.

The tools are our own (Python) unless flags name faster ones that take the same options and print the same JSON.
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from bench_server import Server, free_port, prefer, stop_cleanly_on_signals, tidegate_server
from gateway_report import print_report
from gateway_samples import CASES, PYTHON_LOAD_TOOL, PYTHON_MOCK_TOOL, Case, LoadTool, Sample
from redis import Redis

LITELLM_KEY = "sk-bench-0123456789abcdef0123456789abcdef"
LITELLM_CONFIG = """model_list:
  - model_name: mock-model
    litellm_params:
      model: openai/mock-model
      api_base: http://127.0.0.1:{port}/v1
      api_key: sk-mock
litellm_settings: {{telemetry: false, drop_params: true}}
general_settings: {{disable_spend_logs: true}}
"""


def tidegate(scratch: Path, upstream_port: int, core: int | None) -> Server:
    config = (
        '[[providers]]\nname = "up"\ntype = "openai_compatible"\n'
        f'base_url = "http://127.0.0.1:{upstream_port}/v1"\n'
        '[[models]]\nname = "mock-model"\ntargets = ["up/mock-model"]\n'
    )
    server = tidegate_server(scratch, config, core)
    server.model = "mock-model"
    return server


def other_tidegate(checkout: Path, scratch: Path, upstream_port: int, core: int | None) -> Server:
    """The same of another checkout, to see what a change is worth: runs that follow each other tell less."""
    folder = scratch / "other"
    folder.mkdir()
    server = tidegate(folder, upstream_port, core)
    server.name, server.checkout = "other", checkout.resolve()
    return server


def litellm(command: str, scratch: Path, upstream_port: int, core: int | None) -> Server:
    """LiteLLM's proxy as its makers advise for speed: one worker, production mode, no database, no spend log."""
    path = scratch / "litellm.yaml"
    path.write_text(LITELLM_CONFIG.format(port=upstream_port), encoding="utf-8")
    port = free_port()
    options = ["--config", str(path), "--host", "127.0.0.1", "--port", str(port)]
    return Server(
        name="litellm",
        command=[*command.split(), *options, "--num_workers", "1", "--telemetry", "False"],
        port=port,
        log=scratch / "litellm.log",
        ready_path="/health/liveliness",
        env={
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "LITELLM_MASTER_KEY": LITELLM_KEY,
            "LITELLM_MODE": "PRODUCTION",
            "LITELLM_LOG": "ERROR",
        },
        headers=(f"authorization: Bearer {LITELLM_KEY}",),
        model="mock-model",
        core=core,
    )


@contextmanager
def fake_upstream(command: list[str], core: int | None) -> Iterator[tuple[int, int]]:
    """Process id and port."""
    port = free_port()
    pin = [] if core is None else ["taskset", "-c", str(core)]
    process = subprocess.Popen([*pin, *command, "-p", str(port)])
    try:
        time.sleep(0.5)
        yield process.pid, port
    finally:
        process.terminate()
        process.wait()


def usage_rows_written(server: Server, num_answers: int) -> int:
    """Rows that its store has taken since it was made, those that its cap has dropped since included.

    They are written in batches behind the requests: waits for `num_answers` of them, at most half a minute.
    """
    assert server.data_dir is not None
    with Redis(unix_socket_path=str(server.data_dir / "run" / "store.sock")) as store:
        for _ in range(30):
            rows = int(store.xinfo_stream("tidegate:{usage}:rows")["entries-added"])  # type: ignore[index]
            if rows >= num_answers:
                break
            time.sleep(1.0)
        return rows


class Measurement:
    """Rounds of samples; targets that are not being measured stand still, except tidegate, whose supervisor minds."""

    def __init__(self, args: argparse.Namespace, tool: LoadTool, targets: list[Server]) -> None:
        self.args = args
        self.tool = tool
        self.targets = targets
        self.samples: list[Sample] = []
        self.answers = 0  # that tidegate gave, warm-up included

    def run(self) -> None:
        for number in range(self.args.rounds):
            for case in self.args.cases.split(","):
                turn = number % len(self.targets)
                for target in self.targets[turn:] + self.targets[:turn]:
                    self._measure(number, case, target)

    def _measure(self, number: int, case: str, target: Server) -> None:
        kept: Sample | None = None
        for _ in range(self.args.retries + 1):
            sample = self._sample(CASES[case], target)
            if kept is None or sample["foreign"] < kept["foreign"]:
                kept = sample
            if kept["foreign"] <= self.args.max_foreign:
                break
        assert kept is not None
        kept |= {"round": number, "case": case, "target": target.name}
        self.samples.append(kept)
        print(
            f"round {number} {case:<9} {target.name:<9} {kept['rps']:8.0f} req/s {kept['chunks_s']:7.0f} chunks/s"
            f" {kept['cpu_us'] or 0:9.1f} us CPU each, foreign load {kept['foreign']:.2f}",
            file=sys.stderr,
        )

    def _sample(self, case: Case, target: Server) -> Sample:
        target.resume()
        sample = self.tool.run(target, case)
        if target.name == "tidegate":
            self.answers += sample["st"][1]
        elif target.name != "other":
            time.sleep(0.3 if target.process else 0)  # for what the load tool left behind
            target.pause()
        return sample


def measure(args: argparse.Namespace) -> list[Sample]:
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        upstream = stack.enter_context(fake_upstream(args.mock_tool.split(), args.load_core))
        upstream_pid, upstream_port = upstream
        nothing = Path(os.devnull)
        direct = Server("direct", [], upstream_port, nothing, "/", model="mock-model")
        gateways = [tidegate(scratch, upstream_port, args.gateway_core)]
        if args.other:
            gateways.append(other_tidegate(args.other, scratch, upstream_port, args.gateway_core))
        if args.litellm:
            gateways.append(litellm(args.litellm, scratch, upstream_port, args.gateway_core))
        for gateway in gateways:
            stack.callback(gateway.stop)
            gateway.start()
            print(f"{gateway.name}: ready after {gateway.start_s:.1f} s", file=sys.stderr)
        tool = LoadTool(args.load_tool.split(), args.load_core, args.seconds, upstream_pid)
        measurement = Measurement(args, tool, [direct, *gateways])
        measurement.run()
        rows = usage_rows_written(gateways[0], measurement.answers)
        print(f"tidegate: {measurement.answers} answers, {rows} usage rows in its store")
        if rows < measurement.answers:
            raise SystemExit("usage rows are missing: these numbers are not valid")
        return measurement.samples


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    cores = sorted(os.sched_getaffinity(0))
    add("--rounds", type=int, default=3)
    add("--seconds", type=float, default=3.0, help="measured time of one sample")
    add("--cases", default=",".join(CASES))
    add("--litellm", default=os.environ.get("BENCH_LITELLM", ""), help="command that starts it")
    add("--other", type=Path, help="another checkout of this project, to compare with")
    add("--load-tool", default=" ".join(PYTHON_LOAD_TOOL))
    add("--mock-tool", default=" ".join(PYTHON_MOCK_TOOL))
    add("--gateway-core", type=int, default=cores[0] if len(cores) > 1 else None)
    add("--load-core", type=int, default=cores[1] if len(cores) > 1 else None)
    add("--max-foreign", type=float, default=0.3, help="cores that other programs may use")
    add("--retries", type=int, default=0)
    add("--out", type=Path, help="append every sample as a line of JSON")
    add("--report", type=Path, help="print the tables of such a file, and measure nothing")
    return parser.parse_args()


def read_samples(path: Path) -> list[Sample]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def main() -> None:
    args = parse_args()
    stop_cleanly_on_signals()
    prefer("self")
    atexit.register(prefer, "self", 0)  # the session is that of the shell
    samples = read_samples(args.report) if args.report else measure(args)
    if args.out:
        with args.out.open("a", encoding="utf-8") as out:
            out.writelines(json.dumps(sample) + "\n" for sample in samples)
    print_report(samples)


if __name__ == "__main__":
    main()
