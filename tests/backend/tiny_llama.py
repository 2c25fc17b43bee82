"""A two-layer Llama with random weights: written as GGUF and as a folder, and run densely for reference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Core
from torch import Tensor

from backend.models.batch import Batch, KVCache, Model
from backend.models.config import ModelConfig
from backend.models.layers import inverse_frequencies
from backend.models.tokenizer import byte_level_alphabet

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
LETTERS = [char for char, _ in sorted(byte_level_alphabet().items(), key=lambda item: item[1])]
MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w")]
TOKENS = [*SPECIALS, *LETTERS, *(left + right for left, right in MERGES)]
TOKENS += [f"<|spare_{i}|>" for i in range(272 - len(TOKENS))]  # a vocabulary of whole panels of 16
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
)
CONFIG = ModelConfig(
    family="llama",
    vocab_size=len(TOKENS),
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=16,
    max_position=128,
    rms_norm_eps=2.0**-17,  # exact in float32, as GGUF stores it
    rope_theta=10000.0,
)


def tensors(seed: int = 0, *, tied: bool = False) -> dict[str, Tensor]:
    """By their transformers names; q and k rows in rotate-half order."""
    generator = torch.Generator().manual_seed(seed)
    q_rows, kv_rows = CONFIG.num_heads * CONFIG.head_dim, CONFIG.num_kv_heads * CONFIG.head_dim
    hidden, ffn = CONFIG.hidden_size, CONFIG.intermediate_size
    shapes = {"model.embed_tokens": (CONFIG.vocab_size, hidden), "model.norm": (hidden,)}
    if not tied:
        shapes["lm_head"] = (CONFIG.vocab_size, hidden)
    for layer in range(CONFIG.num_layers):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm"] = shapes[prefix + "post_attention_layernorm"] = (hidden,)
        shapes[prefix + "self_attn.q_proj"] = (q_rows, hidden)
        shapes[prefix + "self_attn.k_proj"] = shapes[prefix + "self_attn.v_proj"] = (
            kv_rows,
            hidden,
        )
        shapes[prefix + "self_attn.o_proj"] = (hidden, q_rows)
        shapes[prefix + "mlp.gate_proj"] = shapes[prefix + "mlp.up_proj"] = (ffn, hidden)
        shapes[prefix + "mlp.down_proj"] = (hidden, ffn)
    made = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        made[name + ".weight"] = 1 + noise / 8 if len(shape) == 1 else noise / shape[1] ** 0.5
    return made


def write_folder(
    folder: Path, weights: dict[str, Tensor], *, shards: int = 1, **config: Any
) -> Path:
    """A transformers folder; `config` entries replace those of config.json (None takes one away)."""
    folder.mkdir(parents=True, exist_ok=True)
    document: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": CONFIG.vocab_size,
        "hidden_size": CONFIG.hidden_size,
        "intermediate_size": CONFIG.intermediate_size,
        "num_hidden_layers": CONFIG.num_layers,
        "num_attention_heads": CONFIG.num_heads,
        "num_key_value_heads": CONFIG.num_kv_heads,
        "head_dim": CONFIG.head_dim,
        "max_position_embeddings": CONFIG.max_position,
        "rms_norm_eps": CONFIG.rms_norm_eps,
        "rope_theta": CONFIG.rope_theta,
        "eos_token_id": 0,
        "tie_word_embeddings": "lm_head.weight" not in weights,
    }
    document |= config
    kept = {key: value for key, value in document.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))
    _write_shards(folder, {name: tensor.contiguous() for name, tensor in weights.items()}, shards)
    tokenizer().save(str(folder / "tokenizer.json"))
    settings = {
        "bos_token": "<|im_start|>",
        "eos_token": {"content": "<|im_end|>"},
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 2]}))
    return folder


def _write_shards(folder: Path, weights: dict[str, Tensor], shards: int) -> None:
    if shards == 1:
        save_file(weights, folder / "model.safetensors")
        return
    names = sorted(weights)
    weight_map = {
        name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors"
        for i, name in enumerate(names)
    }
    for shard in set(weight_map.values()):
        save_file({n: weights[n] for n in names if weight_map[n] == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def tokenizer() -> Core:
    core = Core(models.BPE({token: i for i, token in enumerate(TOKENS)}, MERGES))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIALS])
    return core


_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(
    path: Path, weights: dict[str, Tensor], *, kind: str = "F32", **metadata: Any
) -> Path:
    """With the library's own writer; q and k rows interleaved as llama-arch files have them.

    `metadata` replaces single keys, "__" standing for ".": `general__architecture="qwen3"`.
    """
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in (
        _metadata() | {k.replace("__", "."): v for k, v in metadata.items()}
    ).items():
        if key == "general.architecture":
            writer.kv_data[0][key].value = value
        elif value is not None:
            _add(writer, key, value)
    for name, tensor in weights.items():
        _add_tensor(writer, name, tensor, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _metadata() -> dict[str, Any]:
    return {
        "llama.block_count": CONFIG.num_layers,
        "llama.context_length": CONFIG.max_position,
        "llama.embedding_length": CONFIG.hidden_size,
        "llama.feed_forward_length": CONFIG.intermediate_size,
        "llama.attention.head_count": CONFIG.num_heads,
        "llama.attention.head_count_kv": CONFIG.num_kv_heads,
        "llama.attention.key_length": CONFIG.head_dim,
        "llama.attention.value_length": CONFIG.head_dim,
        "llama.attention.layer_norm_rms_epsilon": CONFIG.rms_norm_eps,
        "llama.rope.freq_base": CONFIG.rope_theta,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [3] * len(SPECIALS) + [1] * (len(TOKENS) - len(SPECIALS)),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in MERGES],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": TEMPLATE,
    }


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    add = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
    }
    add.get(type(value), writer.add_array)(key, value)


def _add_tensor(writer: gguf.GGUFWriter, name: str, tensor: Tensor, kind: str) -> None:
    stem = name.removesuffix(".weight")
    if stem.startswith("model.layers."):
        _, _, layer, rest = stem.split(".", 3)
        stored = f"blk.{layer}.{_GGUF_NAMES[rest]}.weight"
    else:
        stored = f"{_GGUF_NAMES.get(stem, stem)}.weight"
    if stem.endswith("q_proj"):
        tensor = interleaved(tensor, CONFIG.num_heads)
    if stem.endswith("k_proj"):
        tensor = interleaved(tensor, CONFIG.num_kv_heads)
    data = tensor.numpy()
    if kind == "F32" or tensor.dim() == 1:
        writer.add_tensor(stored, data)
        return
    quant = gguf.GGMLQuantizationType[kind]
    writer.add_tensor(stored, gguf.quants.quantize(data, quant), raw_dtype=quant)


def interleaved(weight: Tensor, num_heads: int) -> Tensor:
    """Rotate-half row order to the interleaved order of llama-arch GGUF files."""
    rows, cols = weight.shape
    halves = weight.view(num_heads, 2, rows // num_heads // 2, cols)
    return halves.transpose(1, 2).reshape(rows, cols).contiguous()


def dense_logits(
    weights: dict[str, Tensor], ids: list[int], config: ModelConfig = CONFIG
) -> Tensor:
    """Every position's logits, float64, no cache, no blocks, no fusion: the formula as the papers have it."""
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    return dense_hidden(weights, ids, config) @ head.double().T


def dense_hidden(
    weights: dict[str, Tensor], ids: list[int], config: ModelConfig = CONFIG
) -> Tensor:
    """What the head of `dense_logits` reads: every position behind the last norm."""
    w = {name: tensor.double() for name, tensor in weights.items()}
    positions = torch.arange(len(ids), dtype=torch.float64)
    angles = torch.outer(positions, inverse_frequencies(config).double())
    x = w["model.embed_tokens.weight"][torch.tensor(ids)]
    for layer in range(config.num_layers):
        p = f"model.layers.{layer}."
        h = _norm(x, w[p + "input_layernorm.weight"], config)
        x = x + _dense_attention(h, w, p + "self_attn.", angles, config)
        h = _norm(x, w[p + "post_attention_layernorm.weight"], config)
        gate, up = h @ w[p + "mlp.gate_proj.weight"].T, h @ w[p + "mlp.up_proj.weight"].T
        x = x + (gate * torch.sigmoid(gate) * up) @ w[p + "mlp.down_proj.weight"].T
    return _norm(x, w["model.norm.weight"], config)


def _norm(x: Tensor, weight: Tensor, config: ModelConfig) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + config.rms_norm_eps) * weight


def _dense_attention(
    h: Tensor, w: dict[str, Tensor], p: str, angles: Tensor, config: ModelConfig
) -> Tensor:
    def heads(name: str) -> Tensor:
        return (h @ w[p + name].T).view(len(h), -1, config.head_dim).transpose(0, 1)

    def turned(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    query, key, value = (
        turned(heads("q_proj.weight")),
        turned(heads("k_proj.weight")),
        heads("v_proj.weight"),
    )
    group = config.num_heads // config.num_kv_heads
    key, value = key.repeat_interleave(group, 0), value.repeat_interleave(group, 0)
    scores = query @ key.transpose(1, 2) / config.head_dim**0.5
    scores += torch.full(scores.shape[-2:], float("-inf"), dtype=scores.dtype).triu(1)
    return (scores.softmax(-1) @ value).transpose(0, 1).reshape(len(h), -1) @ w[
        p + "o_proj.weight"
    ].T


def block_tables(tables: list[list[int]]) -> Tensor:
    widest = max(map(len, tables))
    return torch.tensor(
        [table + [0] * (widest - len(table)) for table in tables], dtype=torch.int32
    )


def step(
    model: Model, kv: KVCache, rows: list[list[int]], contexts: list[int], tables: list[list[int]]
) -> Tensor:
    """One forward pass; the last row's logits of each sequence."""
    return model.forward(make_batch(kv, rows, contexts, tables), kv)


def make_batch(
    kv: KVCache, rows: list[list[int]], contexts: list[int], tables: list[list[int]]
) -> Batch:
    """Sequence i feeds `rows[i]` and has `contexts[i]` tokens then."""
    starts = [0]
    positions: list[int] = []
    slots: list[int] = []
    for new, context, table in zip(rows, contexts, tables, strict=True):
        starts.append(starts[-1] + len(new))
        at = range(context - len(new), context)
        positions += at
        slots += [table[p // kv.block_size] * kv.block_size + p % kv.block_size for p in at]
    return Batch(
        token_ids=torch.tensor([token for new in rows for token in new]),
        positions=torch.tensor(positions),
        slot_mapping=torch.tensor(slots),
        query_start=starts,
        context_lens=contexts,
        block_tables=block_tables(tables),
        logits_rows=torch.tensor(starts[1:]) - 1,
    )
