"""A model double that says a script: scheduler, sampler, detokenizer and stop strings around it are the real ones.

A script is `{"pieces": [{"t": text} | {"hex": bytes} | {"special": text}, ...]}`; each piece is one generated token,
then the turn ends.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from backend.models.batch import Batch, KVCache
from tests.backend.toy_model import ToyModel

NUM_BYTES = 256
EOS = NUM_BYTES
FIRST_PIECE = NUM_BYTES + 1
MAX_POSITION = 4096


class ScriptTokenizer:
    """Ids 0-255 are bytes (prompts are spelled in them), 256 ends the turn, then one id for each piece."""

    def __init__(self, pieces: list[dict[str, str]]) -> None:
        self.vocab_size = FIRST_PIECE + len(pieces)
        self.eos_ids = frozenset({EOS})
        self.bos_id = None
        self._bytes = [bytes([i]) for i in range(NUM_BYTES)] + [b""] + [_bytes(p) for p in pieces]
        self._special = {EOS: "<end>"}
        self._special |= {
            FIRST_PIECE + i: piece["special"]
            for i, piece in enumerate(pieces)
            if "special" in piece
        }

    def encode(
        self, text: str, *, add_special: bool = False, parse_special: bool = True
    ) -> list[int]:
        for token_id, special in self._special.items():
            if text == special:
                return [token_id]
        return list(text.encode())

    def token_bytes(self, token_id: int) -> bytes:
        return self._bytes[token_id]

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special

    def token_text(self, token_id: int) -> str:
        return self._special.get(token_id) or self._bytes[token_id].decode(errors="replace")


class ScriptModel(ToyModel):
    """Each piece follows the one before it, whatever the prompt was."""

    def __init__(self, script: dict[str, Any]) -> None:
        super().__init__(max_position=MAX_POSITION, dim=1, num_layers=1)
        self.vocab_size = FIRST_PIECE + len(script["pieces"])

    def forward(self, batch: Batch, kv: KVCache) -> Tensor:
        logits = torch.zeros(len(batch.logits_rows), self.vocab_size)
        for row, token_id in enumerate(batch.token_ids[batch.logits_rows].tolist()):
            logits[row, self._next(token_id)] = 20.0
        return logits

    def _next(self, token_id: int) -> int:
        following = max(token_id + 1, FIRST_PIECE)
        return following if following < self.vocab_size else EOS


def _bytes(piece: dict[str, str]) -> bytes:
    if "special" in piece:
        return b""
    return bytes.fromhex(piece["hex"]) if "hex" in piece else piece["t"].encode()
