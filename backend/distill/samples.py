"""The target's own answers and the hidden states they were drawn from, in shards on disk.

A shard is made whole or not at all, so an interrupted run goes on with the first one missing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from backend.engine.config import EngineConfig
from backend.engine.engine import LLMEngine
from backend.engine.params import GenerationRequest, SamplingParams
from backend.models.batch import Batch, Model, cdiv
from backend.models.tokenizer import Tokenizer

SHARD_ANSWERS = 32  # generated together
BLOCK_SIZE = 16
_TEMPERATURE = 0.8  # of the second and later answers to a prompt; the first is greedy


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer. Row i of `hidden` is what output token i was drawn from."""

    prompt_ids: list[int]
    output_ids: Tensor  # [num_outputs] int64
    hidden: Tensor  # [num_outputs, hidden_size] float16


class Sampling:
    """Makes and keeps the answers of one model."""

    def __init__(self, model: Model, tokenizer: Tokenizer, max_tokens: int, folder: Path) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._folder = folder

    def shard(
        self, name: str, asked: Sequence[tuple[list[int], int]], on_tokens: Callable[[int], None]
    ) -> list[Sample]:
        """The answers to `asked`: prompt ids, and which answer to them this is (0: the greedy one)."""
        path = self._folder / f"{name}.safetensors"
        known = _read(path) if path.exists() else []
        if len(known) < len(asked):  # not made yet, or the last of a run that asked for less
            outputs = self._generate(asked, on_tokens)
            samples = [
                Sample(ids, torch.tensor(output), hidden_states(self._model, ids, output).half())
                for (ids, _), output in zip(asked, outputs, strict=True)
            ]
            _write(samples, path)
            known = _read(path)
        return known[: len(asked)]

    def _generate(
        self, asked: Sequence[tuple[list[int], int]], on_tokens: Callable[[int], None]
    ) -> list[list[int]]:
        longest = max(len(ids) for ids, _ in asked) + self._max_tokens
        num_blocks = 2 + sum(cdiv(len(ids) + self._max_tokens, BLOCK_SIZE) for ids, _ in asked)
        config = EngineConfig(
            num_blocks=num_blocks, max_num_seqs=SHARD_ANSWERS, max_model_len=longest
        )
        engine = LLMEngine(self._model, self._tokenizer, config)
        for index, (ids, nth) in enumerate(asked):
            params = SamplingParams(
                max_tokens=self._max_tokens, temperature=_TEMPERATURE if nth else 0.0, seed=nth
            )
            engine.add(GenerationRequest(str(index), ids, params))
        outputs: list[list[int]] = [[] for _ in asked]
        while engine.has_work:
            for out in engine.step():
                outputs[int(out.request_id)] += out.token_ids
                on_tokens(len(out.token_ids))
        return outputs


def hidden_states(model: Model, prompt_ids: list[int], output_ids: list[int]) -> Tensor:
    """What each output token was drawn from -> [num_outputs, hidden_size] float32, in one step of the model."""
    token_ids = (prompt_ids + output_ids)[:-1]
    num_tokens, num_blocks = len(token_ids), cdiv(len(token_ids), BLOCK_SIZE)
    rows = torch.arange(num_tokens)
    batch = Batch(
        token_ids=torch.tensor(token_ids),
        positions=rows,
        slot_mapping=rows,
        query_start=[0, num_tokens],
        context_lens=[num_tokens],
        block_tables=torch.arange(num_blocks, dtype=torch.int32)[None],
        logits_rows=rows[len(prompt_ids) - 1 :],
    )
    with torch.inference_mode():
        return model.hidden_states(batch, model.new_kv_cache(num_blocks, BLOCK_SIZE)).cpu()


def _write(samples: list[Sample], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    for index, sample in enumerate(samples):
        tensors[f"{index}.prompt"] = torch.tensor(sample.prompt_ids, dtype=torch.int32)
        tensors[f"{index}.output"] = sample.output_ids.int()
        tensors[f"{index}.hidden"] = sample.hidden
    part = path.with_suffix(".part")
    save_file(tensors, part)
    part.replace(path)


def _read(path: Path) -> list[Sample]:
    tensors = load_file(path)
    return [
        Sample(
            tensors[f"{index}.prompt"].tolist(),
            tensors[f"{index}.output"].long(),
            tensors[f"{index}.hidden"],
        )
        for index in range(len(tensors) // 3)
    ]
