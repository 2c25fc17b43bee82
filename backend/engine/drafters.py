"""Who guesses for a model: what the engine was given, refused where it belongs to another."""

from __future__ import annotations

import numpy as np

from backend.engine.config import EngineConfig
from backend.engine.draft_model import DraftModel
from backend.engine.head_drafter import HeadDrafter
from backend.engine.sampler import Sampler
from backend.engine.speculate import Drafter, NgramDrafter
from backend.models.batch import Model
from backend.models.native_head import Head


def new_drafter(
    config: EngineConfig,
    sampler: Sampler,
    hidden_size: int,
    block_rows: np.ndarray,
    num_blocks: int,
    *,
    draft_model: Model | None,
    draft_head: Head | None,
) -> Drafter | None:
    """None: nobody guesses. ValueError when draft model or head do not fit the model."""
    if draft_head is not None:
        _check_head(draft_head, hidden_size, sampler.vocab_size)
        return HeadDrafter(draft_head, sampler)
    if draft_model is not None:
        _check_model(draft_model, sampler.vocab_size)
        return DraftModel(draft_model, config, sampler, num_blocks, block_rows)
    return None if config.speculative == "off" else NgramDrafter()


def _check_model(draft_model: Model, vocab_size: int) -> None:
    if draft_model.vocab_size < vocab_size:
        raise ValueError(
            f"the draft model knows {draft_model.vocab_size} tokens and the model {vocab_size}: "
            "both must have the same vocabulary"
        )


def _check_head(head: Head, hidden_size: int, vocab_size: int) -> None:
    if head.hidden_size != hidden_size:
        raise ValueError(
            f"the draft head reads hidden states of {head.hidden_size} numbers and the model has "
            f"{hidden_size}: it was trained for another model"
        )
    if head.vocab_size < vocab_size or int(head.draft_ids.max()) >= vocab_size:
        raise ValueError(
            f"the draft head knows {head.vocab_size} tokens and the model {vocab_size}: "
            "it was trained for another model"
        )
