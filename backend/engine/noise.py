"""Counter-based randomness: the noise of a draw is a pure function of (seed, position, purpose, token id).

Nothing is stored between draws, so neighbours in the batch, chunking, preemption and speculation cannot
shift it. The generator is splitmix64 (Steele, Lea, Flood 2014) used as a hash: output `i` of the stream
that starts at `key` is `mix64(key + (i + 1) * GOLDEN)`.

The standard exponential variates of 16 neighbouring tokens are made top down: first the least of them,
which is an exponential over 16 at a uniformly chosen token, then every other as that plus a fresh
exponential (an exponential has no memory). So one hash in 16 tells which tokens could still win a race.
"""

from __future__ import annotations

import math

import numpy as np

MASK64 = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
MIX1, MIX2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB

SAMPLE = 0  # purposes: drawing the next token,
GUESS = 1  # guessing it,
ACCEPT = 2  # taking the guess,
RESAMPLE = 3  # drawing another in its place

GROUP = 16
_GOLDEN, _MIX1, _MIX2 = np.uint64(GOLDEN), np.uint64(MIX1), np.uint64(MIX2)
_1, _4, _12, _15, _27, _30, _31 = (np.uint64(n) for n in (1, 4, 12, 15, 27, 30, 31))
_IN_GROUP = np.arange(GROUP)


def mix64(value: int) -> int:
    value = (value ^ (value >> 30)) * MIX1 & MASK64
    value = (value ^ (value >> 27)) * MIX2 & MASK64
    return value ^ (value >> 31)


def draw_key(seed: int, position: int, purpose: int = SAMPLE) -> int:
    """The 64-bit key of one draw; `position` is the index in the sequence of the token to be drawn."""
    stream = mix64((seed + GOLDEN * (purpose + 1)) & MASK64)
    return mix64((stream + GOLDEN * (position + 1)) & MASK64)


def uniform(key: int) -> float:
    """In (0, 1)."""
    return ((mix64((key + GOLDEN) & MASK64) >> 12) + 0.5) * 2.0**-52


class TokenNoise:
    """Exponential variates, one per token of a vocabulary. Not shared between threads: it reuses buffers."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        num_groups = -(-vocab_size // GROUP)
        self._counters = np.arange(1, num_groups + 1, dtype=np.uint64) * _GOLDEN
        self._words = np.empty_like(self._counters)
        self._scratch = np.empty_like(self._counters)

    def exponential(self, key: int, token_ids: np.ndarray) -> np.ndarray:
        """Standard exponential variates of `token_ids` [n] (int64) -> [n] float64, each above 0."""
        ids = token_ids.view(np.uint64)
        words = np.empty((2, len(ids)), np.uint64)  # of the group, of the token
        np.right_shift(ids, _4, out=words[0])
        words[1] = ids
        words += _1
        words *= _GOLDEN
        words += np.array([[key], [mix64(key)]], np.uint64)
        _mix64_array(words, np.empty_like(words))
        # 52 bits and a half step: exact in float64, never 0, never 1
        least, fresh = -np.log(((words >> _12).view(np.int64) + 0.5) * 2.0**-52)
        return least / GROUP + np.where((words[0] & _15) == (ids & _15), 0.0, fresh)

    def ids_below(self, key: int, limit: float) -> np.ndarray:
        """All token ids whose exponential is below `limit`, ascending, among some that are not."""
        np.add(self._counters, np.uint64(key), out=self._words)
        _mix64_array(self._words, self._scratch)
        threshold = int(math.exp(-GROUP * limit) * 2.0**64) - 2**14  # less the rounding above
        groups = np.flatnonzero(self._words >= np.uint64(max(0, threshold)))
        ids = (groups[:, None] * GROUP + _IN_GROUP).reshape(-1)
        return ids[ids < self._vocab_size]


def _mix64_array(values: np.ndarray, scratch: np.ndarray) -> None:
    """`mix64` of every element, in place."""
    for shift, factor in ((_30, _MIX1), (_27, _MIX2)):
        np.right_shift(values, shift, out=scratch)
        np.bitwise_xor(values, scratch, out=values)
        np.multiply(values, factor, out=values)
    np.right_shift(values, _31, out=scratch)
    np.bitwise_xor(values, scratch, out=values)
