"""A draft head on the native tier: 8-bit weights, a quarter of the bytes that a guess has to read."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from gguf import GGMLQuantizationType
from gguf.quants import quantize
from torch import Tensor

from backend.cpu import native
from backend.cpu.native_matrix import NativeMatrix, native_linear, pack_matrix
from backend.cpu.packed import PackedWeight
from backend.models.draft_head import DraftHead

_BLOCK = 32  # weights that share a scale


class Head(Protocol):
    """What guesses: see `DraftHead`, which says what each does."""

    hidden_size: int
    vocab_size: int
    draft_ids: Tensor

    def __call__(self, state: Tensor, token_ids: Tensor) -> Tensor: ...

    def logits(self, state: Tensor) -> Tensor: ...


def fast_head(head: DraftHead) -> Head:
    """The head itself where this machine has no native tier, or its sizes no whole blocks."""
    inner_size = head.down.shape[1]
    if native.native_available() or head.hidden_size % _BLOCK or inner_size % _BLOCK:
        return head
    return NativeHead(head)


class NativeHead:
    """The same head up to the rounding of its weights. One thread: its matrices are too small to share out."""

    def __init__(self, head: DraftHead) -> None:
        self.hidden_size, self.vocab_size = head.hidden_size, head.vocab_size
        self.draft_ids = head.draft_ids
        self._head = head
        self._first = _packed(torch.cat([head.mix, head.gate_up]))
        self._down = _packed(head.down)
        self._out = _packed(head.out)
        self._sizes = [head.hidden_size, head.down.shape[1], head.down.shape[1]]

    def __call__(self, state: Tensor, token_ids: Tensor) -> Tensor:
        x = self._head.inputs(state, token_ids)
        mixed, gate, up = native_linear(x, self._first).split(self._sizes, dim=-1)
        return mixed + native_linear(F.silu(gate) * up, self._down)

    def logits(self, state: Tensor) -> Tensor:
        return native_linear(state, self._out)


def _packed(weight: Tensor) -> NativeMatrix:
    rows, cols = weight.shape
    raw = quantize(weight.detach().float().numpy(), GGMLQuantizationType.Q8_0)
    return pack_matrix([PackedWeight("Q8_0", raw.view(np.uint8).reshape(rows, -1), (rows, cols))])
