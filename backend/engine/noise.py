"""Counter-based randomness: the noise of a draw is a pure function of (seed, position, purpose, token id).

Nothing is stored between draws, so neighbours in the batch, chunking, preemption and speculation cannot
shift it. The generator is splitmix64 (Steele, Lea, Flood 2014) used as a hash: output `i` of the stream
that starts at `key` is `mix64(key + (i + 1) * GOLDEN)`.

A token's uniform variate is made of two parts, so that a whole vocabulary can be screened cheaply: 16
`coarse` bits, four tokens to one hash, and 48 `fine` bits that are computed only for tokens still in the race.
"""

from __future__ import annotations

import math

import numpy as np

MASK64 = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
MIX1, MIX2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB

SAMPLE = 0  # purposes: drawing the next token

_GOLDEN, _MIX1, _MIX2 = np.uint64(GOLDEN), np.uint64(MIX1), np.uint64(MIX2)
_ONE = np.uint64(1)
_LARGEST_BELOW_1 = math.nextafter(1.0, 0.0)


def mix64(value: int) -> int:
    value = (value ^ (value >> 30)) * MIX1 & MASK64
    value = (value ^ (value >> 27)) * MIX2 & MASK64
    return value ^ (value >> 31)


def draw_key(seed: int, position: int, purpose: int = SAMPLE) -> int:
    """The 64-bit key of one draw; `position` is the index in the sequence of the token to be drawn."""
    stream = mix64((seed + GOLDEN * (purpose + 1)) & MASK64)
    return mix64((stream + GOLDEN * (position + 1)) & MASK64)


class TokenNoise:
    """Exponential variates, one per token of a vocabulary. Not shared between threads: it reuses buffers."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        num_words = -(-vocab_size // 4)
        self._counters = np.arange(1, num_words + 1, dtype=np.uint64) * _GOLDEN
        self._words = np.empty(num_words, np.uint64)
        self._shifted = np.empty(num_words, np.uint64)

    def coarse(self, key: int) -> np.ndarray:
        """[vocab_size] uint16, valid until the next call: the top 16 bits of every token's uniform variate."""
        np.add(self._counters, np.uint64(key), out=self._words)
        _mix64_array(self._words, self._shifted)
        return self._words.view("<u2")[: self._vocab_size]

    def exponential(self, key: int, token_ids: np.ndarray) -> np.ndarray:
        """Standard exponential variates of `token_ids` [n] (int64) -> [n] float64, each above 0."""
        ids = token_ids.astype(np.uint64)
        words = np.uint64(key) + ((ids >> np.uint64(2)) + _ONE) * _GOLDEN
        fine = np.uint64(mix64(key)) + (ids + _ONE) * _GOLDEN
        shifted = np.empty_like(words)
        _mix64_array(words, shifted)
        _mix64_array(fine, shifted)
        coarse = (words >> ((ids & np.uint64(3)) << np.uint64(4))) & np.uint64(0xFFFF)
        bits = (coarse << np.uint64(48)) | (fine >> np.uint64(16))
        uniform = np.minimum((bits.astype(np.float64) + 0.5) * 2.0**-64, _LARGEST_BELOW_1)
        return -np.log1p(-uniform)


def _mix64_array(values: np.ndarray, scratch: np.ndarray) -> None:
    """`mix64` of every element, in place."""
    for shift, factor in ((30, _MIX1), (27, _MIX2)):
        np.right_shift(values, np.uint64(shift), out=scratch)
        np.bitwise_xor(values, scratch, out=values)
        np.multiply(values, factor, out=values)
    np.right_shift(values, np.uint64(31), out=scratch)
    np.bitwise_xor(values, scratch, out=values)
