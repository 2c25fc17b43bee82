"""Tiny models behind the Model protocol, so that the engine's tests need no weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from backend.engine.config import EngineConfig
from backend.engine.engine import LLMEngine
from backend.engine.params import GenerationRequest, RequestClass, SamplingParams, StepOutput
from backend.models.batch import Batch, KVCache

EOS = 0
VOCAB_SIZE = 64
# Two letters to a token, the bytes of some characters in pieces, a byte that is never text.
PIECES = [b"", *(bytes([65 + i % 26, 97 + i // 2]) for i in range(50))]
PIECES += [
    b"\xf0\x9f",
    b"\x98",
    b"\x80",
    b"\xc3",
    b"\xa9",
    b"\xff",
    b" ",
    b"\xe2\x82",
    b"\xac",
    b"!",
]
PIECES += [b"the ", b"."]
PIECES += [b"~"] * (VOCAB_SIZE - len(PIECES))


class ToyTokenizer:
    """Ids to the pieces given; id 0 ends the turn."""

    def __init__(self, pieces: Sequence[bytes] = PIECES) -> None:
        self.pieces = pieces
        self.vocab_size = len(pieces)
        self.eos_ids = frozenset({EOS})

    def token_bytes(self, token_id: int) -> bytes:
        return self.pieces[token_id]

    def is_special(self, token_id: int) -> bool:
        return token_id == EOS


class ToyModel:
    """A two-layer float64 transformer with random weights: every token's logits depend on every token before it.

    It reads keys and values only through the block tables, so a wrong slot, block or position changes the text.
    """

    is_batch_invariant = False

    def __init__(
        self,
        max_position: int = 512,
        seed: int = 0,
        dim: int = 16,
        num_layers: int = 2,
        window: int | None = None,
    ) -> None:
        self.window = window
        self.vocab_size, self.hidden_size = VOCAB_SIZE, dim
        self.max_position = max_position
        self.fingerprint = f"toy-{seed}"
        self.num_forwards = 0
        self.num_tokens_seen: list[int] = []  # tokens in each forward
        self._dim, self._num_layers = dim, num_layers
        generator = torch.Generator().manual_seed(seed)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64) / math.sqrt(
                shape[-1]
            )

        self._embed = random(VOCAB_SIZE, dim) * 4
        self._place = random(max_position, dim) * 4
        self._qkv = [random(3 * dim, dim) * 2 for _ in range(num_layers)]
        self._mlp = [random(dim, dim) * 2 for _ in range(num_layers)]
        self._head = random(VOCAB_SIZE, dim) * 0.7

    def kv_bytes_per_block(self, block_size: int) -> int:
        return 2 * 8 * self._num_layers * block_size * self._dim

    def new_kv_cache(self, num_blocks: int, block_size: int) -> KVCache:
        shape = (1, num_blocks, block_size, self._dim)
        keys, values = (
            [torch.zeros(shape, dtype=torch.float64) for _ in range(self._num_layers)]
            for _ in range(2)
        )
        return KVCache(keys, values, block_size)

    def forward(self, batch: Batch, kv: KVCache) -> Tensor:
        return self.logits(self.hidden_states(batch, kv))

    def logits(self, hidden: Tensor) -> Tensor:
        return (hidden @ self._head.T).float()

    def hidden_states(self, batch: Batch, kv: KVCache) -> Tensor:
        self.num_forwards += 1
        self.num_tokens_seen.append(len(batch.token_ids))
        x = self._embed[batch.token_ids] + self._place[batch.positions]
        for layer in range(self._num_layers):
            q, k, v = (x @ self._qkv[layer].T).split(self._dim, dim=-1)
            kv.keys[layer].view(-1, self._dim)[batch.slot_mapping] = k
            kv.values[layer].view(-1, self._dim)[batch.slot_mapping] = v
            x = x + self._attend(q, batch, kv, layer)
            x = x + torch.tanh(x @ self._mlp[layer].T)
        return x[batch.logits_rows]

    def _attend(self, q: Tensor, batch: Batch, kv: KVCache, layer: int) -> Tensor:
        out = torch.empty_like(q)
        for seq, context_len in enumerate(batch.context_lens):
            rows = slice(batch.query_start[seq], batch.query_start[seq + 1])
            blocks = batch.block_tables[seq].long()
            keys = kv.keys[layer][0, blocks].flatten(
                0, 1
            )  # [num_slots, dim], the unwritten ones masked below
            values = kv.values[layer][0, blocks].flatten(0, 1)
            key_positions, positions = torch.arange(len(keys)), batch.positions[rows, None]
            visible = key_positions <= positions
            if self.window is not None:
                visible &= key_positions > positions - self.window
            assert int(batch.positions[rows][-1]) == context_len - 1
            scores = (q[rows] @ keys.T / math.sqrt(self._dim)).masked_fill(~visible, -math.inf)
            out[rows] = scores.softmax(-1) @ values
        return out


class ScriptModel(ToyModel):
    """Says what `script` says: the output token behind position `p` is `script(p, token at p)`, with a wide margin."""

    def __init__(
        self, script: Callable[[int, int], int], vocab_size: int = VOCAB_SIZE, **kwargs: int
    ) -> None:
        super().__init__(**kwargs)
        self.vocab_size = vocab_size
        self._script = script

    def forward(self, batch: Batch, kv: KVCache) -> Tensor:
        self.num_forwards += 1
        logits = torch.zeros(len(batch.logits_rows), self.vocab_size)
        for i, row in enumerate(batch.logits_rows.tolist()):
            position, token_id = int(batch.positions[row]), int(batch.token_ids[row])
            logits[i, self._script(position, token_id)] = 20.0
        return logits


def new_engine(
    model: ToyModel | None = None,
    tokenizer: ToyTokenizer | None = None,
    draft_model: ToyModel | None = None,
    clock: Callable[[], float] = lambda: 0.0,
    **config: object,
) -> LLMEngine:
    settings = {"block_size": 4, "num_blocks": 256, **config}
    return LLMEngine(
        model or ToyModel(),
        tokenizer or ToyTokenizer(),
        EngineConfig(**settings),  # pyright: ignore[reportArgumentType]
        draft_model=draft_model,
        clock=clock,
        entropy=iter(range(1, 10**6)).__next__,
    )


def request(
    request_id: str,
    prompt_ids: Sequence[int],
    klass: RequestClass = RequestClass.STANDARD,
    cache_salt: bytes = b"",
    **params: object,
) -> GenerationRequest:
    settings = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, **params}
    return GenerationRequest(
        request_id,
        list(prompt_ids),
        SamplingParams(**settings),  # pyright: ignore[reportArgumentType]
        klass,
        cache_salt,
    )


def run(
    engine: LLMEngine, *requests: GenerationRequest, max_steps: int = 10_000
) -> dict[str, StepOutput]:
    """Add all, step to idle, and join each request's outputs. Fails if the engine does not come to rest."""
    for item in requests:
        engine.add(item)
    outputs: list[StepOutput] = []
    for _ in range(max_steps):
        if not engine.has_work:
            break
        outputs += engine.step()
    assert not engine.has_work
    assert engine.stats().num_free_blocks == engine.stats().num_blocks
    return joined(outputs)


def joined(outputs: Sequence[StepOutput]) -> dict[str, StepOutput]:
    """One output per request: pieces appended, everything else from the last piece."""
    whole: dict[str, StepOutput] = {}
    for piece in outputs:
        before = whole.get(piece.request_id)
        if before is not None:
            assert before.finish_reason is None, "output after the end"
            piece.token_ids = before.token_ids + piece.token_ids
            piece.text = before.text + piece.text
            piece.logprobs = before.logprobs + piece.logprobs
            piece.prompt_logprobs = before.prompt_logprobs + piece.prompt_logprobs
        whole[piece.request_id] = piece
    return whole
