"""A GGUF file's tensors by their transformers names, stacked experts taken apart, q and k rows in rotate-half order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from backend.cpu.packed import PackedWeight
from backend.models.errors import ModelLoadError
from backend.models.families import family_named
from backend.models.gguf import GGUFFile
from backend.models.gguf_config import config_from_gguf

_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
# All experts in one tensor [experts, rows, cols]; files before 2024 hold one tensor each, "ffn_gate.3".
_STACKED = {
    "ffn_gate_exps": "gate_proj",
    "ffn_up_exps": "up_proj",
    "ffn_down_exps": "down_proj",
}
_ONE_EXPERT = {"ffn_gate": "gate_proj", "ffn_up": "up_proj", "ffn_down": "down_proj"}


@dataclass(frozen=True, slots=True)
class _Stored:
    name: str
    expert: int | None = None  # which part of a stacked tensor


class GGUFCheckpoint:
    def __init__(self, file: GGUFFile) -> None:
        self.source = str(file.path)
        self.file = file
        embedding = file.tensor("token_embd.weight")
        self.config = config_from_gguf(file.metadata, embedding.shape[0], self.source, file.tensors)
        self._family = family_named(self.config.family)
        self._stored_as: dict[str, _Stored] = {}
        for stored in file.tensors:
            self._stored_as.update(self._named(stored))

    def names(self) -> Iterable[str]:
        return self._stored_as.keys()

    def stored_name(self, name: str) -> str:
        """The tensor of the file that `name` is, or is a part of."""
        return self._stored_as[name].name

    def weight(self, name: str) -> PackedWeight:
        stored = self._stored_as.get(name, _Stored(name))
        weight = self.file.tensor(stored.name)
        if stored.expert is not None:
            return self._one_expert(weight, stored.expert)
        if not self._family.gguf_rotary_interleaved:
            return weight
        if ".q_proj." in name:
            return _unpermuted(weight, self.config.num_heads, self.source)
        if ".k_proj." in name:
            return _unpermuted(weight, self.config.num_kv_heads, self.source)
        return weight

    def _named(self, stored: str) -> dict[str, _Stored]:
        """`blk.3.ffn_up.weight` is `model.layers.3.mlp.up_proj.weight`; what has no such name keeps its own."""
        stem, _, kind = stored.rpartition(".")
        if stem in _TOP:
            return {f"{_TOP[stem]}.{kind}": _Stored(stored)}
        if not stem.startswith("blk.") or stem.count(".") < 2:
            return {stored: _Stored(stored)}
        _, layer, part = stem.split(".", 2)
        prefix = f"model.layers.{layer}."
        if part in _STACKED and self.config.experts:
            return {
                f"{prefix}mlp.experts.{i}.{_STACKED[part]}.{kind}": _Stored(stored, i)
                for i in range(self.config.experts.num_experts)
            }
        name, _, expert = part.partition(".")
        if expert and name in _ONE_EXPERT:
            return {f"{prefix}mlp.experts.{expert}.{_ONE_EXPERT[name]}.{kind}": _Stored(stored)}
        own = self._family.gguf_layer_names
        return {f"{prefix}{own.get(part, _LAYER.get(part, part))}.{kind}": _Stored(stored)}

    def _one_expert(self, weight: PackedWeight, expert: int) -> PackedWeight:
        assert self.config.experts is not None
        count = self.config.experts.num_experts
        rows, cols = weight.shape
        if rows % count:
            raise ModelLoadError(f"{self.source}: {rows} rows are not those of {count} experts")
        each = rows // count
        raw = weight.raw[expert * each : (expert + 1) * each]
        return PackedWeight(weight.kind, raw, (each, cols))


def _unpermuted(weight: PackedWeight, num_heads: int, source: str) -> PackedWeight:
    """Llama GGUFs interleave the two halves of each rotary head: row 2i of a head is i, row 2i + 1 is half + i.

    The head count is that of this very matrix; k has fewer under grouped-query attention. A bias is one row.
    """
    bias = weight.shape[0] == 1
    rows = weight.shape[1] if bias else weight.shape[0]
    if rows % (2 * num_heads):
        raise ModelLoadError(f"{source}: {rows} rows of q or k do not make {num_heads} even heads")
    order = np.arange(rows).reshape(num_heads, rows // num_heads // 2, 2).swapaxes(1, 2).reshape(-1)
    if not bias:
        return weight.rows_permuted(order)
    values = weight.dequantize().numpy()[:, order].copy()
    return PackedWeight("F32", values.view(np.uint8), weight.shape)
