"""The training of a draft head: its guesses are drawn towards the target's own law, some tokens deep.

Each example starts from a true hidden state and goes on from the head's own states, as guessing does; the loss is the
cross-entropy with the target's law over the draft vocabulary (in the line of DistillSpec, Zhou et al., 2024), and
deeper guesses count less.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from backend.distill.windows import Windows
from backend.models.batch import Model
from backend.models.draft_head import DraftHead

CHECKPOINT = "checkpoint.pt"
_WARMUP_STEPS, _LEAST_RATE = 50, 0.05
_HEAD_ROWS = 256  # of the model's output head, read at a time


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    steps: int
    batch_size: int = 256
    depth: int = 4  # tokens guessed behind each other
    depth_weight: float = 0.8  # of a guess, in terms of the one before it
    learning_rate: float = 1e-3
    checkpoint_steps: int = 50


def known_draft_ids(folder: Path) -> Tensor | None:
    """The draft vocabulary of the checkpoint in `folder`; more answers must not change it half-way."""
    path = folder / CHECKPOINT
    return _read_checkpoint(path, "cpu")["head"]["draft_ids"] if path.exists() else None


def _read_checkpoint(path: Path, device: str) -> dict[str, Any]:
    try:
        return torch.load(path, device, weights_only=True)
    except (OSError, RuntimeError, EOFError, UnpicklingError) as exc:
        raise ValueError(f"{path} is damaged; remove it to begin anew") from exc


def new_head(model: Model, draft_ids: Tensor, vocab_size: int, inner_size: int) -> DraftHead:
    """Starts out with the model's own rows of the output head, for reading and for guessing."""
    head = DraftHead(draft_ids, vocab_size, model.hidden_size, inner_size)
    rows = output_rows(model, draft_ids)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        head.out.copy_(rows)
        head.embed[:-1] = rows
        head.embed[-1] = rows.mean(0)
        for weight in (head.mix, head.gate_up, head.down):
            weight.normal_(0.0, weight.shape[1] ** -0.5, generator=generator)
    return head


def output_rows(model: Model, token_ids: Tensor) -> Tensor:
    """The rows of the model's output head for these tokens [n, hidden_size]: its logits of the unit vectors."""
    unit = torch.eye(model.hidden_size)
    parts = [model.logits(rows)[:, token_ids].T for rows in unit.split(_HEAD_ROWS)]
    return torch.cat(parts, dim=1).float()


class Training:
    """Goes on from its checkpoint in `folder`; which examples a step sees depends on its number alone."""

    def __init__(
        self, head: DraftHead, windows: Windows, plan: TrainingPlan, folder: Path, device: str
    ) -> None:
        self.step = 0
        self.head = head.to(device)
        self._windows = windows
        self._plan = plan
        self._path = folder / CHECKPOINT
        self._device = device
        self._target_rows = head.out.detach().clone()
        self._optimizer = torch.optim.AdamW(head.parameters(), plan.learning_rate, (0.9, 0.98))
        if self._path.exists():
            self._resume()

    def run(self) -> Iterator[float]:
        """Yields the loss of each step. Leaves a checkpoint every now and then and at the end, however it ends."""
        try:
            while self.step < self._plan.steps:
                loss = self._take_step()
                self.step += 1
                if self.step % self._plan.checkpoint_steps == 0:
                    self._save()
                yield loss
        finally:
            self._save()

    def _take_step(self) -> float:
        for group in self._optimizer.param_groups:
            group["lr"] = self._plan.learning_rate * rate_at(self.step, self._plan.steps)
        loss = self._loss()
        self._optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
        self._optimizer.step()
        return loss.item()

    def _loss(self) -> Tensor:
        plan = self._plan
        places, exists = self._windows.batch(self.step, plan.batch_size, plan.depth)
        token_ids = self._windows.token_ids[places].to(self._device)
        hidden = self._windows.hidden[places].to(self._device).float()
        exists = exists.to(self._device)
        state, total = hidden[:, 0], torch.zeros((), device=self._device)
        for k in range(plan.depth):
            state = self.head(state, token_ids[:, k])
            with torch.no_grad():
                law = F.linear(hidden[:, k + 1], self._target_rows).softmax(-1)
            errors = F.cross_entropy(self.head.logits(state), law, reduction="none")
            mean = (errors * exists[:, k]).sum() / exists[:, k].sum().clamp(min=1)
            total = total + plan.depth_weight**k * mean
        return total

    def _save(self) -> None:
        part = self._path.with_suffix(".part")
        state = {
            "step": self.step,
            "head": self.head.state_dict(),
            "optimizer": self._optimizer.state_dict(),
        }
        torch.save(state, part)
        part.replace(self._path)

    def _resume(self) -> None:
        """ValueError when the checkpoint belongs to a head of another shape."""
        state = _read_checkpoint(self._path, self._device)
        try:
            self.head.load_state_dict(state["head"])
        except RuntimeError as exc:
            raise ValueError(
                f"{self._path} is of a head of another shape; remove it to begin anew"
            ) from exc
        self._optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]


def rate_at(step: int, steps: int) -> float:
    """The share of the learning rate: up in a straight line, then down in a cosine."""
    if step < _WARMUP_STEPS:
        return (step + 1) / _WARMUP_STEPS
    done = min(1.0, (step - _WARMUP_STEPS) / max(1, steps - _WARMUP_STEPS))
    return _LEAST_RATE + (1 - _LEAST_RATE) * 0.5 * (1 + math.cos(math.pi * done))
