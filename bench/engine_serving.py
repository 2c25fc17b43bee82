"""Tokens per second and latency of the built-in engine through the whole gateway; beside other servers, by flags.

    python bench/engine_serving.py [--model M.gguf] [--levels 1,4,16,32] [--rounds 3] [--threads N]
        [--llama-server CMD --llama-model Q4_0.gguf --llama-model Q8_0.gguf]
        [--transformers CMD --transformers-model HF_FOLDER] [--load-client load_openai.py] [--out samples.jsonl]
    python bench/engine_serving.py --report samples.jsonl

Streams of 64 greedy tokens after prompts of 128 words (`--prompt-words`), about as many tokens, closed loop. In each
round and at each concurrency every server gets the same prompts, and no prompt comes twice, so that no prefix cache
helps. Servers take turns, the order rotates; peers that are not being measured stand still. Beside each sample stands
how many cores other programs used: two OpenMP threads on busy cores wait for each other at each barrier, so only calm
samples say something about speed.
"""

from __future__ import annotations

import argparse
import asyncio
import atexit
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import engine_servers
from bench_server import ROOT, prefer, stop_cleanly_on_signals
from engine_report import print_report
from engine_servers import Contender
from process_meter import cpu_s, machine_busy_s, rss_mb
from stream_client import make_prompts, run_load

OUTPUT_TOKENS = 64
Sample = dict[str, Any]


def contenders(args: argparse.Namespace, scratch: Path) -> list[Contender]:
    chosen = [
        engine_servers.tidegate(scratch, args.model, args.threads, options)
        for options in args.engine or [""]
    ]
    slots = max(map(int, args.levels.split(",")))
    room = 2 * args.prompt_words  # for the answer too, and for words of two tokens
    chosen += [
        engine_servers.llama_server(
            scratch, args.llama_server, model, args.threads, slots=slots, slot_tokens=room
        )
        for model in args.llama_model
    ]
    for dtype in args.transformers_dtype.split(",") if args.transformers else ():
        folder = args.transformers_model
        chosen.append(
            engine_servers.transformers(scratch, args.transformers, folder, args.threads, dtype)
        )
    return chosen


def one_load(args: argparse.Namespace, contender: Contender, seed: str, level: int) -> Sample:
    count = max(args.min_requests, args.requests_per_stream * level)
    if args.load_client:
        return _load_by_client(args, contender, seed, level, count)
    prompts = make_prompts(count, args.prompt_words, seed)
    return asyncio.run(run_load(contender.server, prompts, level, OUTPUT_TOKENS, contender.extra))


def _load_by_client(
    args: argparse.Namespace, contender: Contender, seed: str, level: int, count: int
) -> Sample:
    """The same load by another client, which prints its findings as JSON."""
    server = contender.server
    number = int.from_bytes(seed.encode(), "big") % 2**31
    command = [sys.executable, str(args.load_client), "--json", "-", "--warmup", "0"]
    command += ["--base-url", f"http://127.0.0.1:{server.port}/v1", "--model", server.model]
    command += ["--endpoint", "completions", "--concurrency", str(level), "--seed", str(number)]
    command += ["--num-requests", str(count), "--prompt-tokens", str(args.prompt_words)]
    command += ["--output-tokens", str(OUTPUT_TOKENS)]
    command += [option for header in server.headers for option in ("--api-key", header.split()[-1])]
    if "ignore_eos" in contender.extra:
        command.append("--ignore-eos")
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False)
    found = json.loads(done.stdout)["results"][0]
    ttft, tpot = found["ttft_ms"] or {}, found["tpot_ms"] or {}
    return {
        "wall_s": found["wall_s"],
        "requests": found["requests"],
        "completed": found["completed"],
        "num_tokens": found["output_tokens_total"],
        "prompt_tokens": found["prompt_tokens_total"],
        "tok_s": found["output_tok_per_s"],
        "ttft_p50_ms": ttft.get("p50", 0.0),
        "ttft_p95_ms": ttft.get("p95", 0.0),
        "tpot_p50_ms": tpot.get("p50", 0.0),
        "first_error": found.get("first_error", ""),
    }


def take_sample(args: argparse.Namespace, contender: Contender, number: int, level: int) -> Sample:
    server = contender.server
    server.resume()
    pids = server.pids
    begin_s, busy_s, own_s = time.monotonic(), machine_busy_s(), cpu_s(pids)
    client_s = sum(os.times()[:4])
    sample = one_load(args, contender, f"{args.seed}/{number}/{level}", level)
    wall_s = time.monotonic() - begin_s
    own_s = cpu_s(pids) - own_s
    client_s = sum(os.times()[:4]) - client_s
    foreign = max(0.0, (machine_busy_s() - busy_s - own_s - client_s) / wall_s)
    sample |= {"tok_cpu_s": sample["num_tokens"] / max(own_s, 0.01), "foreign": foreign}
    sample |= {"rss_mb": rss_mb(pids), "server": server.name, "level": level, "round": number}
    if contender.may_pause:
        server.pause()
    print(
        f"round {number} c={level:<3} {server.name:<18} {sample['tok_s']:7.1f} tok/s  TTFT p50"
        f" {sample['ttft_p50_ms']:6.0f} ms  TPOT {sample['tpot_p50_ms']:6.1f} ms  {sample['tok_cpu_s']:6.1f} tok/CPU-s"
        f"  foreign load {foreign:.2f}  {sample['completed']}/{sample['requests']} {sample['first_error']}",
        file=sys.stderr,
    )
    return sample


def measure(args: argparse.Namespace) -> list[Sample]:
    samples: list[Sample] = []
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        chosen = contenders(args, scratch)
        for contender in chosen:
            stack.callback(contender.server.stop)
            contender.server.start()
            contender.server.model = engine_servers.served_model(contender.server)
            one_load(args, contender, f"{args.seed}/warm", 1)
            if contender.may_pause:
                contender.server.pause()
        for number in range(args.rounds):
            turn = number % len(chosen)
            for level in map(int, args.levels.split(",")):
                for contender in chosen[turn:] + chosen[:turn]:
                    samples.append(take_sample(args, contender, number, level))
                    if args.out:
                        with args.out.open("a", encoding="utf-8") as out:
                            out.write(json.dumps(samples[-1]) + "\n")
    return samples


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", type=Path, help="of Tidegate; default: the demo model")
    add(
        "--engine",
        action="append",
        help='more of the engine table: \'activations = "int8"\'; once for each Tidegate, "" for the plain one',
    )
    add("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of every server")
    add("--levels", default="1,4,16,32", help="streams at once")
    add("--prompt-words", type=int, default=128)
    add("--rounds", type=int, default=3)
    add("--requests-per-stream", type=int, default=2)
    add("--min-requests", type=int, default=4)
    add("--seed", default="0")
    add("--llama-server", default=os.environ.get("BENCH_LLAMA_SERVER", "llama-server"))
    add("--llama-model", type=Path, action="append", default=[], help="a GGUF file; repeatable")
    add("--transformers", default=os.environ.get("BENCH_TRANSFORMERS", ""))
    add("--transformers-model", type=Path, help="a folder in Hugging Face layout")
    add("--transformers-dtype", default="bfloat16,float32", help="each is a server of its own")
    add("--load-client", type=Path, help="a script with the options of our reference client")
    add("--out", type=Path, help="append every sample as a line of JSON")
    add("--report", type=Path, help="print the tables of such a file, and measure nothing")
    args = parser.parse_args()
    if args.transformers and not args.transformers_model:
        parser.error("--transformers needs --transformers-model")
    return args


def main() -> None:
    args = parse_args()
    stop_cleanly_on_signals()
    prefer("self")
    atexit.register(prefer, "self", 0)  # the session is that of the shell
    if args.report:
        lines = args.report.read_text(encoding="utf-8").splitlines()
        print_report([json.loads(line) for line in lines])
        return
    if args.model is None:
        from backend.models.demo import fetch_demo_model

        args.model = fetch_demo_model(ROOT / "data")
    args.model = args.model.resolve()
    print_report(measure(args))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
