"""How far guesses get: tokens a step of the target brings, with a fixed number of guesses and no clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from backend.distill.samples import Sample
from backend.engine.ngram import TokenHistory
from backend.models.draft_head import DraftHead

DEPTH = 4  # guesses in each step

# The guesses behind output token i of a sample.
Guess = Callable[[int], list[int]]


def acceptance_length(samples: Sequence[Sample], guesses_of: Callable[[Sample], Guess]) -> float:
    """Tokens a step, from 1 (no guess ever right) to 1 + DEPTH, over the greedy answers of `samples`."""
    num_tokens = num_steps = 0
    for sample in samples:
        guess, output_ids = guesses_of(sample), sample.output_ids.tolist()
        place = 0  # of the last token known
        while place < len(output_ids) - 1:
            num_right = _num_common(guess(place), output_ids[place + 1 :])
            num_steps += 1
            num_tokens += min(num_right + 1, len(output_ids) - 1 - place)
            place += num_right + 1
    return num_tokens / max(1, num_steps)


def no_guesses(sample: Sample) -> Guess:
    return lambda place: []


def ngram_guesses(sample: Sample) -> Guess:
    history, token_ids = TokenHistory(), sample.prompt_ids + sample.output_ids.tolist()
    num_prompt = len(sample.prompt_ids)
    return lambda place: history.continuation(token_ids[: num_prompt + place + 1], DEPTH)


def head_guesses(head: DraftHead) -> Callable[[Sample], Guess]:
    def guesses_of(sample: Sample) -> Guess:
        guessed: list[torch.Tensor] = []
        with torch.inference_mode():
            state, last_ids = sample.hidden.float(), sample.output_ids
            for _ in range(DEPTH):
                state = head(state, last_ids)
                last_ids = head.draft_ids[head.logits(state).argmax(-1)]
                guessed.append(last_ids)
        rows = torch.stack(guessed, dim=1).tolist()
        return lambda place: rows[place]

    return guesses_of


def _num_common(left: Sequence[int], right: Sequence[int]) -> int:
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return min(len(left), len(right))
