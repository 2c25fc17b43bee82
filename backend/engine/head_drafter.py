"""A trained head guesses from the hidden state that the model's last token was drawn from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from backend.engine.request import EngineRequest
from backend.engine.sampler import Sampler
from backend.models.native_head import Head


class HeadDrafter:
    """One pass of the head for every guess, all requests together. Draws as a draft model does, from fewer tokens."""

    def __init__(self, head: Head, sampler: Sampler) -> None:
        self._head = head
        self._sampler = sampler
        self._draft_ids = head.draft_ids.numpy()
        self._logits = np.full(sampler.vocab_size, -np.inf, np.float32)

    def plan(self, request: EngineRequest, limit: int) -> int:
        """A request that decodes has its state: at least its last prompt token was computed, never found."""
        return limit if request.drafts.hidden is not None else 0

    @torch.inference_mode()
    def propose(self, requests: Sequence[EngineRequest]) -> None:
        active = list(requests)
        last_ids = [request.token_ids[-1] for request in active]
        state = torch.from_numpy(
            np.stack([r.drafts.hidden for r in active if r.drafts.hidden is not None])
        )
        for k in range(1, max(request.drafts.num_granted for request in requests) + 1):
            state = self._head(state, torch.tensor(last_ids))
            for request, row in zip(active, self._head.logits(state).numpy(), strict=True):
                self._logits[self._draft_ids] = row
                self._sampler.guess(self._logits, request)
            # Those that are granted more; a request whose row held no numbers has no guess and stops too.
            going = [
                i
                for i, r in enumerate(active)
                if k == len(r.drafts.token_ids) < r.drafts.num_granted
            ]
            if not going:
                return
            active, state = [active[i] for i in going], state[going]
            last_ids = [request.drafts.token_ids[-1] for request in active]

    def forget(self, request: EngineRequest) -> None:
        """Nothing: what a request needs it carries."""
