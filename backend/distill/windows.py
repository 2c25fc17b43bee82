"""Training examples: every token of the answers, with what followed it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from backend.distill.samples import Sample


@dataclass(frozen=True, slots=True)
class Windows:
    """All answers behind one another. Token i was drawn from `hidden[i]` and has `num_after[i]` behind it."""

    token_ids: Tensor  # [num_tokens] int64
    hidden: Tensor  # [num_tokens, hidden_size] float16
    num_after: Tensor  # [num_tokens] int64
    starts: Tensor  # [num_windows] int64: the tokens that have one behind them

    def batch(self, seed: int, size: int, depth: int) -> tuple[Tensor, Tensor]:
        """Windows drawn at random -> the places of their tokens [size, depth + 1], and which exist [size, depth]."""
        generator = torch.Generator().manual_seed(seed)
        picked = self.starts[torch.randint(len(self.starts), (size,), generator=generator)]
        places = picked[:, None] + torch.arange(depth + 1)
        exists = torch.arange(1, depth + 1) <= self.num_after[picked][:, None]
        return places.clamp_(max=len(self.token_ids) - 1), exists


def windows_of(samples: Sequence[Sample]) -> Windows:
    """ValueError when no answer has two tokens."""
    lengths = [len(sample.output_ids) for sample in samples]
    num_after = torch.cat([torch.arange(length - 1, -1, -1) for length in lengths])
    starts = num_after.nonzero().view(-1)
    if not len(starts):
        raise ValueError("the model's answers are all shorter than two tokens: nothing to learn")
    return Windows(
        torch.cat([sample.output_ids for sample in samples]),
        torch.cat([sample.hidden for sample in samples]),
        num_after,
        starts,
    )


def commonest_tokens(token_ids: Tensor, vocab_size: int, count: int) -> Tensor:
    """The `count` tokens that come most often, then those of the lowest ids, which tokenizers learn first."""
    counts = torch.bincount(token_ids, minlength=vocab_size)[:vocab_size]
    return counts.argsort(descending=True, stable=True)[: min(count, vocab_size)]
