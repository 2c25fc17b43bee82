"""What speculation makes of one stream, in process: output tokens per second without, with n-grams, with a draft head.

    python bench/speculation.py --model MODEL.gguf [--head DIR] [--threads 2] [--max-tokens 200] [--rounds 5]

Each round runs every prompt once without and once with each kind of guesses, greedy, to the end of its turn; all
must give the same tokens. The time is that of decoding, from the first token to the last, and the engine's clock,
by which it decides how much to guess, is the same: `--clock cpu` counts the processor time of this process, which
is wall time on a quiet machine with one thread and stays true on a busy one. Prints the median over the rounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from backend.engine.config import EngineConfig
from backend.engine.engine import LLMEngine
from backend.engine.params import GenerationRequest, SamplingParams
from backend.models.draft_head import load_draft_head
from backend.models.loader import LoadedModel, load_model
from backend.models.native_head import Head, fast_head

STORY = (
    "The harbour of Lindholm lies at the end of a long inlet. In winter the ferries stop at noon, and the pilots"
    " walk home along the dike. Old Marten kept the light for forty years; he wrote down every ship that passed,"
    " its flag, its cargo and the hour. When the tower was sold, his books were carried to the town library, where"
    " they fill two shelves. Students come from the city to read them, and the baker sells them rolls at the door."
)
CODE = """def load_settings(path):
    settings = {}
    for line in open(path):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        key, value = line.split("=", 1)
        settings[key.strip()] = value.strip()
    return settings


def save_settings(path, settings):
    with open(path, "w") as file:
        for key, value in sorted(settings.items()):
            file.write(f"{key} = {value}\\n")
"""
PROMPTS = {
    "repeat a text": f"Repeat the following text word for word.\n\n{STORY}",
    "return a program": f"Rename the function load_settings to read_settings and print the whole program.\n\n{CODE}",
    "quote an answer": f"{STORY}\n\nWhat did Old Marten do? Quote the sentences that say so.",
    "tell something new": "Write a story about a fox who learns to sail.",
}


def decode(
    engine: LLMEngine, clock: Callable[[], float], prompt_ids: list[int], max_tokens: int
) -> tuple[list[int], float, int, int]:
    """-> tokens, seconds between the first and the last, guesses, guesses that were right."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    engine.add(GenerationRequest("r", prompt_ids, params))
    tokens: list[int] = []
    started, last = 0.0, None
    while engine.has_work:
        for output in engine.step():
            if not tokens:
                started = clock()
            tokens += output.token_ids
            last = output
    seconds = clock() - started
    assert last is not None
    return tokens, seconds, last.num_draft_tokens, last.num_accepted_tokens


def new_engine(
    loaded: LoadedModel, how: str, head: Head | None, clock: Callable[[], float]
) -> LLMEngine:
    config = EngineConfig(num_blocks=256, speculative="ngram" if how == "ngram" else "off")
    draft_head = head if how == "head" else None
    return LLMEngine(loaded.model, loaded.tokenizer, config, draft_head=draft_head, clock=clock)


def prompt_ids(loaded: LoadedModel, text: str) -> list[int]:
    assert loaded.chat_template is not None
    rendered = loaded.chat_template.render([{"role": "user", "content": text}], None)
    return loaded.tokenizer.encode(rendered)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--head", type=Path, help="a folder that distill-draft wrote")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    args = parser.parse_args()
    clock = time.process_time if args.clock == "cpu" else time.perf_counter
    loaded = load_model(args.model, threads=args.threads)
    head = fast_head(load_draft_head(args.head)) if args.head else None
    names = ("off", "ngram", "head") if head else ("off", "ngram")
    engines = {name: new_engine(loaded, name, head, clock) for name in names}
    print(
        f"{loaded.name}, {args.threads} threads, {args.clock} time, load {os.getloadavg()[0]:.1f} at start"
    )
    print(
        "| prompt | off, tok/s |"
        + "".join(f" {n}, tok/s | ratio | guessed | right |" for n in names[1:])
    )
    print("|---|---|" + "---|---|---|---|" * len(names[1:]))
    for name, text in PROMPTS.items():
        ids = prompt_ids(loaded, text)
        speeds: dict[str, list[float]] = {name: [] for name in names}
        texts, counts = set[tuple[int, ...]](), dict[str, list[int]]()
        for _ in range(args.rounds):
            for how, engine in engines.items():
                tokens, seconds, *counted = decode(engine, clock, ids, args.max_tokens)
                speeds[how].append((len(tokens) - 1) / seconds)
                texts.add(tuple(tokens))
                counts[how] = counted
        same = "" if len(texts) == 1 else " (other text!)"
        off, *others = (statistics.median(speeds[how]) for how in names)
        cells = [
            f" {speed:.1f} | {speed / off:.2f} | {counts[how][0]} | {counts[how][1]} |"
            for how, speed in zip(names[1:], others, strict=True)
        ]
        print(f"| {name}{same} | {off:.1f} |" + "".join(cells))
    print(f"load {os.getloadavg()[0]:.1f} at end")


if __name__ == "__main__":
    main()
