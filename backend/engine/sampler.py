"""Logits to token ids, row by row, so that no request's draw can depend on its neighbours.

A draw is `argmin(exponential_i / p_i)`, which is Gumbel-max (`argmax(log p_i + gumbel_i)`) with one logarithm
less. The noise comes from `noise.py`. All is numpy on the host: on a CPU its single-threaded SIMD passes over one
row (argmax 4 us at 49k tokens, torch's 50 us) beat a thread pool that the model's own threads compete with. Where there
is a native library, it makes the same draws in a tenth of the time (`backend/cpu/native_draw.py`).

Guesses (speculative decoding). A token is drawn as ever, and the guess for it was right if it is the same one. Where
there was one guess to make (n-grams, greedy), that accepts it with exactly the probability that the model gives it.
A draft model guesses with the very noise that the token will be drawn with, so that alike laws mostly agree (Daliri,
Musco, Suresh, 2024); the text of a seeded request then does not depend on who guessed what, or how far. For requests
without a seed, whose text nobody can ask for again, the classic rejection rule accepts more: there the draft model
draws with noise of its own and keeps the law it drew from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from backend.cpu.native_draw import NativeDraw, native_draw
from backend.engine.noise import ACCEPT, GUESS, RESAMPLE, SAMPLE, TokenNoise, draw_key, uniform
from backend.engine.params import SamplingParams, TokenLogprob
from backend.engine.rejection import accept_or_resample
from backend.engine.request import EngineRequest

GREEDY_BELOW = 1e-5  # temperatures under this are greedy: dividing by them would overflow float32
MIN_LOGPROB = -9999.0  # what an impossible token reports; JSON has no -inf
_RACE_MARGINS = (
    5.5,
    2.5,
)  # in units of the temperature: about as many tokens in the head as in the rest
_SORT_MARGINS = (8.0, 3.0)  # nats below the largest logit where the likeliest tokens are looked for
_MAX_HEAD = 4096


class Draw(NamedTuple):
    token_id: int
    logprob: TokenLogprob | None  # None: not asked for


class Guess(NamedTuple):
    token_id: int
    law: np.ndarray  # [vocab_size], that it was drawn from


class Sampler:
    """Draws tokens. Truncation order: top_k, top_p of what top_k left, min_p."""

    def __init__(self, vocab_size: int, *, native: bool = True) -> None:
        """`native`: let the native library draw, where there is one."""
        self.vocab_size = vocab_size
        self._native = native_draw() if native else None
        self._noise = TokenNoise(vocab_size)
        self._all_ids = np.arange(vocab_size)

    def sample(
        self, raw: np.ndarray, request: EngineRequest, guess: Guess | None = None
    ) -> Draw | None:
        """The next token of `request`, from its logits `raw` [vocab_size] float32; None when they are not numbers.

        `guess`: what a draft model drew for it, and from which law.
        """
        params, logits = request.params, _legal_logits(raw, request)
        position = request.num_tokens
        best = int(logits.argmax())
        if not math.isfinite(logits[best]):
            return None
        if guess is None:
            token_id = self._choose(logits, best, params, draw_key(request.seed, position))
        else:
            token_id = accept_or_resample(
                law(logits, params),
                guess.law,
                guess.token_id,
                uniform(draw_key(request.seed, position, ACCEPT)),
                self._noise.exponential(draw_key(request.seed, position, RESAMPLE), self._all_ids),
            )
        if params.logprobs is None:
            return Draw(token_id, None)
        return Draw(token_id, token_logprob(raw, token_id, params.logprobs, self._native))

    def guess(self, raw: np.ndarray, request: EngineRequest) -> None:
        """Draw the request's next guess from a draft model's logits `raw` [vocab_size]; none from what is no number."""
        params, drafts, logits = request.params, request.drafts, _legal_logits(raw, request)
        best = int(logits.argmax())
        if not math.isfinite(logits[best]):
            return
        position = request.num_tokens + len(drafts.token_ids)
        keeps_law = params.seed is None and not is_greedy(params)
        purpose = GUESS if keeps_law else SAMPLE
        token_id = self._choose(logits, best, params, draw_key(request.seed, position, purpose))
        drafts.token_ids.append(token_id)
        if keeps_law:
            drafts.laws.append(law(logits, params))

    def _choose(self, logits: np.ndarray, best: int, params: SamplingParams, key: int) -> int:
        return best if is_greedy(params) else self._draw(logits, float(logits[best]), params, key)

    def _draw(self, logits: np.ndarray, peak: float, params: SamplingParams, key: int) -> int:
        if self._native is not None:
            return self._native.draw(
                logits,
                peak,
                temperature=params.temperature,
                top_k=params.top_k,
                top_p=params.top_p,
                floor=min_p_floor(peak, params),
                key=key,
            )
        if 0 < params.top_k < len(logits) or params.top_p < 1.0:
            ids = kept_ids(logits, peak, params)
            return int(ids[self._race(logits, peak, params.temperature, key, ids).argmin()])
        return self._draw_from_all(logits, peak, params, key)

    def _draw_from_all(
        self, logits: np.ndarray, peak: float, params: SamplingParams, key: int
    ) -> int:
        """The same winner as a race of the whole vocabulary, found without running it.

        The likeliest tokens run first. The rest all lie at least `margin` nats below the likeliest, so one of
        them can only win with an exponential below exp(best - margin / temperature); noise alone tells which.
        """
        floor = min_p_floor(peak, params)
        margins = [margin * params.temperature for margin in _RACE_MARGINS]
        margin, ids = head_ids(logits, peak, margins, floor)
        if len(ids) > _MAX_HEAD:  # a flat distribution: any of the rest may be as likely as these
            margin, ids = 0.0, ids[:_MAX_HEAD]
        scores = self._race(logits, peak, params.temperature, key, ids)
        first = int(scores.argmin())
        if margin >= peak - floor:
            return int(ids[first])
        best = float(scores[first])
        limit = math.exp(best - margin / params.temperature + 1e-4)  # 1e-4: float32 cut the head
        rest = self._noise.ids_below(key, limit)
        rest = rest[logits[rest] >= floor]
        if len(rest):
            rest_scores = self._race(logits, peak, params.temperature, key, rest)
            last = int(rest_scores.argmin())
            if rest_scores[last] < best:
                return int(rest[last])
        return int(ids[first])

    def _race(
        self, logits: np.ndarray, peak: float, temperature: float, key: int, ids: np.ndarray
    ) -> np.ndarray:
        """Logarithms of the finishing times of `ids` [n] -> [n] float64; the smallest wins."""
        log_weights = (logits[ids].astype(np.float64) - peak) / temperature
        return np.log(self._noise.exponential(key, ids)) - log_weights


def is_greedy(params: SamplingParams) -> bool:
    return params.temperature < GREEDY_BELOW or params.top_k == 1


def law(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """The probabilities [vocab_size] float64 that a draw has, after temperature and truncation."""
    peak = float(logits.max())
    if 0 < params.top_k < len(logits) or params.top_p < 1.0:
        ids = kept_ids(logits, peak, params)
    else:
        ids = np.flatnonzero(logits >= min_p_floor(peak, params))
    weights = np.zeros(len(logits))
    weights[ids] = np.exp((logits[ids].astype(np.float64) - peak) / params.temperature)
    return weights / weights.sum()


def _legal_logits(raw: np.ndarray, request: EngineRequest) -> np.ndarray:
    """What the request's rules and grammar make of its row; `raw` stays as it is.

    Where they leave no token (min_tokens forbids the end, the grammar all else), the grammar has it.
    """
    rules, grammar = request.rules, request.grammar
    if rules is None and grammar is None:
        return raw
    logits = raw.copy()
    if rules is not None:
        rules.apply(logits)
    if grammar is not None:
        grammar.apply(logits)
        if rules is not None and logits.max() == -math.inf:
            logits = raw.copy()
            grammar.apply(logits)
    return logits


def head_ids(
    logits: np.ndarray,
    peak: float,
    margins: Sequence[float] = _SORT_MARGINS,
    floor: float = -math.inf,
) -> tuple[float, np.ndarray]:
    """The first margin that is narrow enough, and all ids within it of the peak and not below `floor`, ascending."""
    for margin in margins:
        ids = np.flatnonzero(logits >= max(peak - margin, floor))
        if len(ids) <= _MAX_HEAD:
            break
    return margin, ids


def min_p_floor(peak: float, params: SamplingParams) -> float:
    """Logits below this have less than `min_p` times the probability of the likeliest token."""
    if params.min_p <= 0.0:
        return -math.inf
    return peak + params.temperature * math.log(params.min_p)


def kept_ids(logits: np.ndarray, peak: float, params: SamplingParams) -> np.ndarray:
    """The ids that top_k, top_p and min_p leave, likeliest first; never none."""
    if 0 < params.top_k < len(logits):
        ids = likeliest_ids(logits, peak, params.top_k)
        total = float(_weights(logits[ids], peak, params).sum(dtype=np.float64))
    else:
        ids = _likeliest_first(logits, head_ids(logits, peak)[1])
        total = float(_weights(logits, peak, params).sum(dtype=np.float64))
        if _weights(logits[ids], peak, params).sum() < params.top_p * total:
            ids = _likeliest_first(logits, np.arange(len(logits)))
    if params.top_p < 1.0:
        weights = _weights(logits[ids], peak, params)
        before = np.cumsum(weights, dtype=np.float64) - weights
        ids = ids[: max(1, np.count_nonzero(before < params.top_p * total))]
    return ids[logits[ids] >= min_p_floor(peak, params)]


def likeliest_ids(logits: np.ndarray, peak: float, count: int) -> np.ndarray:
    """The `count` ids of the largest logits, largest first, equal ones by rising id."""
    _, ids = head_ids(logits, peak)
    if len(ids) < count:
        ids = np.arange(len(logits))
    if count < len(ids):
        threshold = np.partition(logits[ids], -count)[-count] if count else np.inf
        ids = ids[logits[ids] >= threshold]
    return _likeliest_first(logits, ids)[:count]


def token_logprob(
    logits: np.ndarray, token_id: int, num_top: int, native: NativeDraw | None = None
) -> TokenLogprob:
    """Log-probabilities of one token and of the `num_top` likeliest, from `logits` [vocab_size] as they are."""
    peak = float(logits.max())
    if native is None:
        log_total = peak + math.log(float(np.exp(logits - np.float32(peak)).sum()))
        ids = likeliest_ids(logits, peak, num_top)
    else:
        log_total = peak + math.log(native.weight(logits, peak))
        ids = native.likeliest_ids(logits, peak, num_top)
    top = tuple(
        (top_id, _floored(value - log_total))
        for top_id, value in zip(ids.tolist(), logits[ids].tolist(), strict=True)
    )
    return TokenLogprob(token_id, _floored(float(logits[token_id]) - log_total), top)


def _likeliest_first(logits: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Ascending `ids` by falling logit, equal ones by rising id."""
    return ids[np.argsort(-logits[ids], kind="stable")]


def _weights(logits: np.ndarray, peak: float, params: SamplingParams) -> np.ndarray:
    """Probabilities relative to the likeliest token."""
    return np.exp((logits - np.float32(peak)) / np.float32(params.temperature))


def _floored(logprob: float) -> float:
    return min(0.0, logprob) if logprob > MIN_LOGPROB else MIN_LOGPROB
