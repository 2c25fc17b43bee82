from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from backend.models.batch import KVCache, Model
from backend.models.checkpoint import SafetensorsCheckpoint
from backend.models.config import ModelConfig, RopeScaling
from backend.models.errors import ModelLoadError
from backend.models.gguf import GGUFFile
from backend.models.gguf_checkpoint import GGUFCheckpoint
from backend.models.layers import inverse_frequencies
from backend.models.llama import Llama, read_llama_weights
from backend.models.quantized import in_quantization
from tests.backend import tiny_llama
from tests.backend.tiny_llama import CONFIG, dense_hidden, dense_logits, make_batch, step

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 6e-2}
IDS = [3, 40, 41, 200, 7, 7, 99, 150, 31, 12, 64, 5, 77, 180, 21, 90, 33, 34, 35, 36, 37, 210, 8]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama.write_folder(tmp_path_factory.mktemp("tiny"), tiny_llama.tensors())


def build(folder: Path, dtype: torch.dtype = torch.float32, quantization: str = "none") -> Llama:
    checkpoint = in_quantization(SafetensorsCheckpoint(folder), quantization)
    activations = "int8" if quantization == "w8a8" else "float32"
    return Llama(read_llama_weights(checkpoint, checkpoint.config), dtype, activations)


@pytest.fixture(scope="module")
def llama(folder: Path) -> Llama:
    return build(folder)


def greedy_states(
    model: Model, kv: KVCache, ids: list[int], table: list[int], chunk: int
) -> list[Tensor]:
    """The last row's logits after every chunk."""
    out = []
    for start in range(0, len(ids), chunk):
        rows = ids[start : start + chunk]
        out.append(step(model, kv, [rows], [start + len(rows)], [table])[0])
    return out


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_whole_prompt_in_one_step_equals_the_dense_formula(
    folder: Path, dtype: torch.dtype
) -> None:
    model = build(folder, dtype)
    logits = step(model, model.new_kv_cache(8, 4), [IDS], [len(IDS)], [list(range(8))])
    assert logits.dtype == torch.float32
    wanted = dense_logits(tiny_llama.tensors(), IDS)[-1:].float()
    assert (logits - wanted).abs().max() < TOLERANCE[dtype]


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 16])
def test_chunks_of_any_size_equal_the_dense_formula(llama: Llama, chunk: int) -> None:
    wanted = dense_logits(tiny_llama.tensors(), IDS).float()
    for got, end in zip(
        greedy_states(llama, llama.new_kv_cache(8, 4), IDS, list(range(8)), chunk),
        [min(start + chunk, len(IDS)) for start in range(0, len(IDS), chunk)],
        strict=True,
    ):
        assert (got - wanted[end - 1]).abs().max() < TOLERANCE[torch.float32]


def test_scattered_blocks_equal_consecutive_ones(llama: Llama) -> None:
    together = greedy_states(llama, llama.new_kv_cache(8, 4), IDS, list(range(8)), 4)
    apart = greedy_states(llama, llama.new_kv_cache(30, 4), IDS, [17, 3, 29, 0, 11, 8], 4)
    assert torch.allclose(torch.stack(together), torch.stack(apart), atol=1e-5)


def test_a_mixed_step_gives_every_sequence_its_own_answer(llama: Llama) -> None:
    """Decodes of unlike lengths, a first chunk and a later chunk, all in one step."""
    rng = random.Random(0)
    lengths, new = [1, 2, 23, 5, 9, 17, 30], [1, 1, 1, 5, 4, 1, 1]
    prompts = [[rng.randrange(CONFIG.vocab_size) for _ in range(n)] for n in lengths]
    blocks = list(range(60))
    rng.shuffle(blocks)
    tables = [[blocks.pop() for _ in range(-(-n // 4))] for n in lengths]
    kv = llama.new_kv_cache(60, 4)
    for prompt, count, table in zip(prompts, new, tables, strict=True):
        if len(prompt) > count:
            step(llama, kv, [prompt[:-count]], [len(prompt) - count], [table])
    rows = [prompt[-count:] for prompt, count in zip(prompts, new, strict=True)]
    logits = step(llama, kv, rows, lengths, tables)
    for got, prompt in zip(logits, prompts, strict=True):
        wanted = dense_logits(tiny_llama.tensors(), prompt)[-1].float()
        assert (got - wanted).abs().max() < TOLERANCE[torch.float32]


def test_hidden_states_equal_the_dense_formula(llama: Llama) -> None:
    kv = llama.new_kv_cache(8, 4)
    batch = make_batch(kv, [IDS], [len(IDS)], [list(range(8))])
    batch.logits_rows = torch.arange(len(IDS))
    wanted = dense_hidden(tiny_llama.tensors(), IDS).float()
    assert (llama.hidden_states(batch, kv) - wanted).abs().max() < TOLERANCE[torch.float32]


def test_only_the_wanted_rows_have_logits(llama: Llama) -> None:
    logits = step(llama, llama.new_kv_cache(8, 4), [[1, 2, 3], [4]], [3, 1], [[0], [1]])
    assert logits.shape == (2, CONFIG.vocab_size)


FORMATS = [
    (dtype, quantization)
    for dtype in (torch.float32, torch.bfloat16)
    for quantization in ("none", "w8", "w4", "w8a8")
]


@pytest.mark.parametrize(("dtype", "quantization"), FORMATS, ids=str)
def test_a_chunk_may_want_no_logits_at_all(
    folder: Path, dtype: torch.dtype, quantization: str
) -> None:
    model = build(folder, dtype, quantization)
    kv = model.new_kv_cache(8, 4)
    batch = make_batch(kv, [IDS[:6]], [6], [[0, 1]])
    batch.logits_rows = batch.logits_rows[:0]
    assert model.forward(batch, kv).shape == (0, CONFIG.vocab_size)
    assert kv.keys[1][:, 0].abs().sum() > 0


def test_rows_beside_it_do_not_change_a_sequence(llama: Llama) -> None:
    alone = step(llama, llama.new_kv_cache(8, 4), [IDS[:6]], [6], [[0, 1]])[0]
    kv = llama.new_kv_cache(8, 4)
    beside = step(llama, kv, [IDS[3:9], IDS[:6]], [6, 6], [[4, 5], [2, 7]])[1]
    assert torch.allclose(alone, beside, atol=1e-5)


def test_cached_garbage_past_the_context_is_never_read(llama: Llama) -> None:
    kv = llama.new_kv_cache(8, 4)
    for tensor in (*kv.keys, *kv.values):
        tensor.fill_(1e4)
    got = greedy_states(llama, kv, IDS, list(range(8)), 5)[-1]
    assert (got - dense_logits(tiny_llama.tensors(), IDS)[-1].float()).abs().max() < 2e-5


def test_gguf_and_safetensors_of_one_model_answer_alike(tmp_path: Path, llama: Llama) -> None:
    path = tiny_llama.write_gguf(tmp_path / "tiny.gguf", tiny_llama.tensors())
    checkpoint = GGUFCheckpoint(GGUFFile(path))
    other = Llama(read_llama_weights(checkpoint, checkpoint.config), torch.float32)
    first, second = (
        step(m, m.new_kv_cache(8, 4), [IDS], [len(IDS)], [list(range(8))]) for m in (llama, other)
    )
    assert torch.equal(first, second)


@pytest.mark.parametrize("source", ["gguf", "folder"])
def test_a_tied_head_is_the_embedding(tmp_path: Path, source: str) -> None:
    weights = tiny_llama.tensors(tied=True)
    if source == "gguf":
        checkpoint = GGUFCheckpoint(GGUFFile(tiny_llama.write_gguf(tmp_path / "t.gguf", weights)))
    else:
        checkpoint = SafetensorsCheckpoint(tiny_llama.write_folder(tmp_path, weights))
    read = read_llama_weights(checkpoint, checkpoint.config)
    assert read.lm_head is read.embed
    model = Llama(read, torch.float32)
    got = step(model, model.new_kv_cache(8, 4), [IDS], [len(IDS)], [list(range(8))])[0]
    assert (got - dense_logits(weights, IDS)[-1].float()).abs().max() < 2e-5


SCALINGS = [
    RopeScaling("linear", 4.0),
    RopeScaling("llama3", 8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=32),
]


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda s: s.kind)
def test_scaled_rotary_equals_the_dense_formula(folder: Path, scaling: RopeScaling) -> None:
    config = replace(CONFIG, rope_scaling=scaling)
    model = Llama(read_llama_weights(SafetensorsCheckpoint(folder), config), torch.float32)
    got = step(model, model.new_kv_cache(8, 4), [IDS], [len(IDS)], [list(range(8))])[0]
    assert (got - dense_logits(tiny_llama.tensors(), IDS, config)[-1].float()).abs().max() < 2e-5
    assert (got - dense_logits(tiny_llama.tensors(), IDS)[-1].float()).abs().max() > 1e-3


def test_llama3_scaling_keeps_fast_pairs_slows_slow_ones_and_blends_between() -> None:
    """By wavelength, as the Llama 3.1 release words it."""
    scaling = RopeScaling(
        "llama3", 8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192
    )
    config = replace(CONFIG, head_dim=128, rope_theta=500000.0, rope_scaling=scaling)
    plain = inverse_frequencies(replace(config, rope_scaling=None)).tolist()
    kinds = set()
    for before, after in zip(plain, inverse_frequencies(config).tolist(), strict=True):
        wavelength = 2 * math.pi / before
        if wavelength < 8192 / 4:
            kinds.add("fast")
            wanted = before
        elif wavelength > 8192 / 1:
            kinds.add("slow")
            wanted = before / 8
        else:
            kinds.add("between")
            share = (8192 / wavelength - 1) / (4 - 1)
            wanted = (1 - share) * before / 8 + share * before
        assert after == pytest.approx(wanted, rel=1e-5)
    assert kinds == {"fast", "slow", "between"}


def test_positions_past_the_first_rotary_table_grow_it(folder: Path) -> None:
    config = replace(CONFIG, max_position=4096)
    model = Llama(read_llama_weights(SafetensorsCheckpoint(folder), config), torch.float32)
    ids = [(7 * i) % 250 for i in range(1100)]
    kv = model.new_kv_cache(70, 16)
    got = greedy_states(model, kv, ids, list(range(69)), 1099)[-1]
    assert (got - dense_logits(tiny_llama.tensors(), ids, config)[-1].float()).abs().max() < 1e-4


def test_four_bit_weights_serve_a_four_bit_checkpoint_almost_losslessly(tmp_path: Path) -> None:
    weights = tiny_llama.tensors()
    path = tiny_llama.write_gguf(tmp_path / "q4_1.gguf", weights, kind="Q4_1")
    checkpoint = GGUFCheckpoint(GGUFFile(path))
    stored = {name: checkpoint.weight(name).dequantize().view_as(weights[name]) for name in weights}
    model = Llama(read_llama_weights(checkpoint, checkpoint.config), torch.bfloat16)
    got = torch.stack(greedy_states(model, model.new_kv_cache(8, 4), IDS, list(range(8)), 1))
    wanted = dense_logits(stored, IDS).float()
    assert torch.nn.functional.cosine_similarity(got, wanted).min() > 0.998


def test_the_fingerprint_tells_formats_apart(folder: Path) -> None:
    prints = {build(folder, dtype, quantization).fingerprint for dtype, quantization in FORMATS}
    assert len(prints) == len(FORMATS)


@pytest.mark.parametrize(("quantization", "limit"), [("w8", 0.999), ("w4", 0.92), ("w8a8", 0.998)])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_quantized_model_answers_nearly_like_the_dense_formula(
    folder: Path, quantization: str, limit: float, dtype: torch.dtype
) -> None:
    model = build(folder, dtype, quantization)
    got = torch.stack(greedy_states(model, model.new_kv_cache(8, 4), IDS, list(range(8)), 1))
    wanted = dense_logits(tiny_llama.tensors(), IDS).float()
    assert torch.nn.functional.cosine_similarity(got, wanted).min() > limit


def test_kv_bytes_are_those_of_the_cache_that_is_made(folder: Path) -> None:
    for dtype in TOLERANCE:
        model = build(folder, dtype)
        kv = model.new_kv_cache(10, 4)
        total = sum(tensor.nbytes for tensor in (*kv.keys, *kv.values))
        assert model.kv_bytes_per_block(4) * 10 == total


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"intermediate_size": 100},
            "tensor model.layers.0.mlp.gate_proj.weight is [96, 64], expected [100, 64]",
        ),
        ({"num_layers": 3}, "tensor model.layers.2.input_layernorm.weight is missing"),
        (
            {"num_kv_heads": 3},
            "tensor model.layers.0.self_attn.k_proj.weight is [32, 64], expected [48, 64]",
        ),
    ],
)
def test_weights_that_do_not_fit_the_shape_are_named(
    folder: Path, change: dict[str, int], says: str
) -> None:
    config: ModelConfig = replace(CONFIG, **change)
    with pytest.raises(ModelLoadError) as caught:
        read_llama_weights(SafetensorsCheckpoint(folder), config)
    assert says in str(caught.value)
