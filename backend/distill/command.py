"""`tidegate distill-draft MODEL --data FILE --out DIR`: answers, then training, then a report. Each step resumes.

In DIR: `run.json` (what the samples belong to), `samples/`, `checkpoint.pt`, `head.safetensors`, `report.json`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from backend.distill.acceptance import (
    DEPTH,
    acceptance_length,
    head_guesses,
    ngram_guesses,
    no_guesses,
)
from backend.distill.prompts import PromptFileError, read_prompts
from backend.distill.samples import SHARD_ANSWERS, Sample, Sampling
from backend.distill.training import Training, TrainingPlan, known_draft_ids, new_head
from backend.distill.windows import commonest_tokens, windows_of
from backend.models.chat_template import TemplateError
from backend.models.draft_head import DraftHead, save_draft_head
from backend.models.errors import DemoModelUnavailable, ModelLoadError
from backend.models.loader import LoadedModel, load_model
from backend.models.locate import locate_model
from backend.progress_bar import Bar, download_bar, progress_bar

EXIT_FAULT, EXIT_INTERRUPTED = 2, 130
# How the fields of run.json are called by who runs the command
NAMES_OF_RUN = {"model": "model", "data_sha256": "--data", "max_tokens": "--max-tokens"}
HELD_EVERY, MAX_HELD = 10, 32  # of the prompts, one in ten is never trained on


class DistillFault(Exception):
    """The user's to mend; the message is one line."""


_FAULTS = (DistillFault, PromptFileError, ModelLoadError, DemoModelUnavailable, TemplateError)


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 2 for a fault that is the user's to mend, 130 when interrupted."""
    args = _parser().parse_args(argv)
    try:
        _distill(args)
    except _FAULTS as exc:
        print(f"tidegate distill-draft: {exc}", file=sys.stderr)
        return EXIT_FAULT
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        return EXIT_INTERRUPTED
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tidegate distill-draft",
        description="Train a small head that guesses a model's next tokens, on the model's own answers.",
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help='a folder, a .gguf file, "owner/name" on the hub, or "demo"')
    add("--data", type=Path, required=True, help="prompts: a text file, one a line, or .jsonl")
    add("--out", type=Path, required=True, metavar="DIR", help="the same DIR goes on")
    add("--steps", type=_count, default=1000, help="of training (default %(default)s)")
    add("--answers", type=_count, default=512, help="to learn from (default %(default)s)")
    add("--max-tokens", type=_count, default=200, help="of an answer (default %(default)s)")
    add(
        "--draft-vocab", type=_count, default=4096, help="tokens it may guess (default %(default)s)"
    )
    add("--width", type=_count, default=512, help="of its inner layer (default %(default)s)")
    add("--batch-size", type=_count, default=256, help="tokens in a step (default %(default)s)")
    add("--threads", type=_count, help="default: what the machine has")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="of the training")
    add("--data-dir", type=Path, default=Path("data"), help="where the demo model lies")
    return parser


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _distill(args: argparse.Namespace) -> None:
    device = _device(args.device)
    prompts = read_prompts(args.data)
    if len(prompts) < 2:
        raise DistillFault(
            f"{args.data}: needs two prompts or more: one is held back for the report"
        )
    with download_bar("fetching the demo model") as report:
        path = locate_model(args.model, args.data_dir, report)
    loaded = load_model(path, threads=args.threads)
    prompt_ids = [_token_ids(loaded, messages) for messages in prompts]
    _check_fits(loaded, prompt_ids, args)
    _claim(args.out, loaded, args)
    held, train = _samples(loaded, prompt_ids, args)
    head = _train(loaded, train, args, device)
    _report(head, held, train[:SHARD_ANSWERS], args)


def _device(asked: str) -> str:
    if asked == "cuda" and not torch.cuda.is_available():
        raise DistillFault("--device cuda: torch finds no GPU here; use auto or cpu")
    return "cuda" if asked == "auto" and torch.cuda.is_available() else asked.replace("auto", "cpu")


def _token_ids(loaded: LoadedModel, messages: list[dict[str, str]]) -> list[int]:
    if loaded.chat_template is not None:
        return loaded.tokenizer.encode(loaded.chat_template.render(messages, None))
    text = "\n".join(str(message["content"]) for message in messages)
    return loaded.tokenizer.encode(text, add_special=True)


def _check_fits(loaded: LoadedModel, prompt_ids: list[list[int]], args: argparse.Namespace) -> None:
    longest = max(map(len, prompt_ids)) + args.max_tokens
    if longest > loaded.model.max_position:
        raise DistillFault(
            f"the longest prompt and --max-tokens {args.max_tokens} are {longest} tokens; "
            f"the model was made for {loaded.model.max_position}"
        )


def _claim(out: Path, loaded: LoadedModel, args: argparse.Namespace) -> None:
    """Samples of another model, other prompts or another length must not mix with these."""
    run = {
        "model": loaded.model.fingerprint,
        "data_sha256": hashlib.sha256(args.data.read_bytes()).hexdigest(),
        "max_tokens": args.max_tokens,
    }
    path = out / "run.json"
    try:
        out.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            if any(out.iterdir()):
                raise DistillFault(f"--out {out}: holds other files; choose a new folder")
            path.write_text(json.dumps(run, indent=1), encoding="utf-8")
        known = json.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise DistillFault(f"--out {out}: cannot be used: {exc.strerror}") from exc
    except ValueError as exc:
        raise DistillFault(f"--out {out}: its run.json is damaged; choose a new folder") from exc
    for key, value in run.items():
        if known.get(key) != value:
            raise DistillFault(
                f"--out {out}: holds a run with another {NAMES_OF_RUN[key]}; choose another folder"
            )


def _samples(
    loaded: LoadedModel, prompt_ids: list[list[int]], args: argparse.Namespace
) -> tuple[list[Sample], list[Sample]]:
    """-> of held prompts, and to learn from: the greedy answer to each prompt, then sampled ones."""
    every = min(HELD_EVERY, len(prompt_ids))
    held = prompt_ids[every - 1 :: every][:MAX_HELD]
    train = [ids for index, ids in enumerate(prompt_ids) if index % every != every - 1]
    asked = [(train[i % len(train)], i // len(train)) for i in range(args.answers)]
    shards = {
        f"{start // SHARD_ANSWERS:05d}": asked[start : start + SHARD_ANSWERS]
        for start in range(0, len(asked), SHARD_ANSWERS)
    }
    sampling = Sampling(loaded.model, loaded.tokenizer, args.max_tokens, args.out / "samples")
    with progress_bar("answers", len(asked) + len(held)) as bar:
        count = _counting(bar)
        held_samples = sampling.shard("held", [(ids, 0) for ids in held], count)
        bar.advance(len(held))
        samples: list[Sample] = []
        for name, part in shards.items():
            samples += sampling.shard(name, part, count)
            bar.advance(len(part))
    return held_samples, samples


def _counting(bar: Bar) -> Callable[[int], None]:
    """Takes tokens as they are generated: a shard of answers alone would stand still for minutes."""
    total = 0

    def count(num_tokens: int) -> None:
        nonlocal total
        total += num_tokens
        bar.tell(f"{total} tokens")

    return count


def _train(
    loaded: LoadedModel, samples: list[Sample], args: argparse.Namespace, device: str
) -> DraftHead:
    try:
        windows = windows_of(samples)
        draft_ids = known_draft_ids(args.out)
        if draft_ids is None:
            draft_ids = commonest_tokens(
                windows.token_ids, loaded.tokenizer.vocab_size, args.draft_vocab
            )
        head = new_head(loaded.model, draft_ids, loaded.tokenizer.vocab_size, args.width)
        plan = TrainingPlan(args.steps, args.batch_size)
        training = Training(head, windows, plan, args.out, device)
    except ValueError as exc:
        raise DistillFault(str(exc)) from exc
    with progress_bar("training", args.steps) as bar:
        bar.advance(min(training.step, args.steps))
        try:
            for loss in training.run():
                bar.advance(1)
                bar.tell(f"loss {loss:.3f}")
        finally:
            save_draft_head(training.head, args.out)
    return training.head.cpu()


def _report(
    head: DraftHead, held: list[Sample], learned: list[Sample], args: argparse.Namespace
) -> None:
    lengths = {
        "none": acceptance_length(held, no_guesses),
        "ngram": acceptance_length(held, ngram_guesses),
        "head": acceptance_length(held, head_guesses(head)),
    }
    known = acceptance_length(learned, head_guesses(head))
    report = {
        "guesses_a_step": DEPTH,
        "held_prompts": len(held),
        "tokens_a_step": lengths,
        "tokens_a_step_where_it_learned": known,
    }
    (args.out / "report.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
    print(
        f"tokens a step of the model on {len(held)} held prompts, greedy, {DEPTH} guesses a step:"
    )
    for name, length in lengths.items():
        print(f"  {name:5} {length:.2f}")
    print(
        f"the head on answers it learned from: {known:.2f}; far above means that it needs more of them"
    )
    print(f'serve it with engine = {{ speculative = "head:{args.out}" }}')
