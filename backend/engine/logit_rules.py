"""Changes to one request's logits before a token is drawn: penalties, bias, and tokens banned for now."""

from __future__ import annotations

import numpy as np

from backend.engine.params import SamplingParams


class LogitRules:
    """`apply` order: repetition penalty, presence and frequency penalties, logit_bias, min_tokens bans.

    Repetition looks at prompt and output (Keskar et al., 2019); presence and frequency at the output only (OpenAI).
    Every distinct token seen has one entry in three parallel arrays, so a step costs the distinct tokens seen,
    never the vocabulary or the length.
    """

    def __init__(
        self, params: SamplingParams, prompt_ids: list[int], eos_ids: frozenset[int]
    ) -> None:
        self._params = params
        self._penalizes = penalizes(params)
        self._entries: dict[int, int] = {}
        self._ids = np.zeros(16, np.int64)
        self._counts = np.zeros(16, np.float32)  # in the output
        if params.repetition_penalty != 1.0:
            for token_id in prompt_ids:
                self._entry(token_id)
        bias = params.logit_bias or {}
        self._bias_ids = np.fromiter(bias.keys(), np.int64, len(bias))
        self._bias = np.fromiter(bias.values(), np.float32, len(bias))
        enders = set(params.stop_token_ids) | (set() if params.ignore_eos else eos_ids)
        self._enders = np.fromiter(enders, np.int64, len(enders))
        self._num_output_tokens = 0

    @staticmethod
    def needed(params: SamplingParams) -> bool:
        return bool(penalizes(params) or params.logit_bias or params.min_tokens)

    def append(self, token_id: int) -> None:
        """Record one output token."""
        self._num_output_tokens += 1
        if self._penalizes:
            entry = self._entry(token_id)  # may replace the arrays
            self._counts[entry] += 1.0

    def apply(self, logits: np.ndarray) -> None:
        """Change `logits` [vocab_size] in place."""
        if self._penalizes:
            self._penalize(logits)
        if len(self._bias_ids):
            logits[self._bias_ids] += self._bias
        if self._num_output_tokens < self._params.min_tokens:
            logits[self._enders] = -np.inf

    def _penalize(self, logits: np.ndarray) -> None:
        params = self._params
        ids, counts = self._ids[: len(self._entries)], self._counts[: len(self._entries)]
        values = logits[ids]
        if (factor := params.repetition_penalty) != 1.0:
            values = np.where(values > 0, values / factor, values * factor)
        values -= params.presence_penalty * (counts > 0) + params.frequency_penalty * counts
        logits[ids] = values

    def _entry(self, token_id: int) -> int:
        entry = self._entries.setdefault(token_id, len(self._entries))
        if entry == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[entry] = token_id
        return entry


def penalizes(params: SamplingParams) -> bool:
    return (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) != (
        0.0,
        0.0,
        1.0,
    )
