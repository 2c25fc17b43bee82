"""A draft head for the toy model, trained on its answers in a second."""

from __future__ import annotations

import functools
import random
import tempfile
from pathlib import Path

import torch

from backend.distill.samples import Sample, Sampling
from backend.distill.training import Training, TrainingPlan, new_head
from backend.distill.windows import windows_of
from backend.models.draft_head import DraftHead
from tests.backend.toy_model import VOCAB_SIZE, ToyModel, ToyTokenizer

INNER_SIZE = 64


def toy_samples(folder: Path, count: int = 32, max_tokens: int = 40) -> list[Sample]:
    rng = random.Random(1)
    asked = [([rng.randrange(1, VOCAB_SIZE) for _ in range(6)] * 2, i % 4) for i in range(count)]
    sampling = Sampling(ToyModel(), ToyTokenizer(), max_tokens, folder)  # pyright: ignore[reportArgumentType]
    return sampling.shard("toy", asked, lambda num_tokens: None)


def new_toy_head() -> DraftHead:
    return new_head(ToyModel(), torch.arange(VOCAB_SIZE - 4), VOCAB_SIZE, INNER_SIZE)


@functools.cache
def toy_head() -> DraftHead:
    with tempfile.TemporaryDirectory() as name:
        windows = windows_of(toy_samples(Path(name), count=20))
        plan = TrainingPlan(steps=120, batch_size=32, learning_rate=4e-3)
        training = Training(new_toy_head(), windows, plan, Path(name), "cpu")
        for _ in training.run():
            pass
    return training.head.requires_grad_(False)
