"""The native Llama against the portable one, and against itself bit for bit, whatever the batch."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from backend.cpu import native
from backend.cpu.packed import PackedWeight
from backend.models.batch import Batch, KVCache
from backend.models.config import ModelConfig
from backend.models.layers import inverse_frequencies
from backend.models.llama import Llama, LlamaLayerWeights, LlamaWeights
from backend.models.native_cache import KV_DTYPES
from backend.models.native_llama import NativeLlama, build_native, unsupported
from tests.backend.native_weights import random_rows, random_weight

BLOCK_SIZE = 16
CONFIG = ModelConfig(
    family="llama",
    vocab_size=90,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=32,
    max_position=512,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
)


@pytest.fixture(scope="module", autouse=True)
def _needs_the_native_tier():
    if reason := native.native_available():
        pytest.skip(f"no native tier: {reason}")


def random_weights(kinds: str = "Q4_1", config: ModelConfig = CONFIG) -> LlamaWeights:
    c, seed = config, iter(range(1000))
    q_rows, kv_rows = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim

    def matrix(rows: int, cols: int) -> PackedWeight:
        return random_weight(kinds, rows, cols, next(seed))

    def norm() -> torch.Tensor:
        return 1 + 0.1 * random_rows(1, c.hidden_size)[0]

    def layer() -> LlamaLayerWeights:
        return LlamaLayerWeights(
            attn_norm=norm(),
            qkv=tuple(matrix(r, c.hidden_size) for r in (q_rows, kv_rows, kv_rows)),  # type: ignore[arg-type]
            attn_out=matrix(c.hidden_size, q_rows),
            mlp_norm=norm(),
            gate_up=tuple(matrix(c.intermediate_size, c.hidden_size) for _ in range(2)),  # type: ignore[arg-type]
            down=matrix(c.hidden_size, c.intermediate_size),
        )

    embed = matrix(c.vocab_size, c.hidden_size)
    return LlamaWeights(
        config=c,
        fingerprint="random",
        embed=embed,
        layers=[layer() for _ in range(c.num_layers)],
        norm=norm(),
        lm_head=embed,
        inv_freq=inverse_frequencies(c),
    )


def make_batch(
    *sequences: tuple[list[int], int, list[int]],
    block_size: int = BLOCK_SIZE,
    every_row: bool = False,
) -> Batch:
    """Each sequence: its new token ids, how many tokens the cache already holds, its block table."""
    token_ids, positions, slots, starts, contexts = [], [], [], [0], []
    for ids, past, table in sequences:
        for offset, token in enumerate(ids):
            at = past + offset
            token_ids.append(token)
            positions.append(at)
            slots.append(table[at // block_size] * block_size + at % block_size)
        starts.append(len(token_ids))
        contexts.append(past + len(ids))
    tables = torch.zeros(len(sequences), max(len(t) for *_, t in sequences), dtype=torch.int32)
    for row, (*_, table) in zip(tables, sequences, strict=True):
        row[: len(table)] = torch.tensor(table)
    rows = range(len(token_ids)) if every_row else [end - 1 for end in starts[1:]]
    return Batch(
        torch.tensor(token_ids),
        torch.tensor(positions),
        torch.tensor(slots),
        starts,
        contexts,
        tables,
        torch.tensor(list(rows)),
    )


@pytest.fixture(scope="module", params=KV_DTYPES, ids=str)
def model(request: pytest.FixtureRequest) -> NativeLlama:
    """With every format of the cache: each must keep every promise."""
    return NativeLlama(CONFIG, random_weights(), threads=2, kv_dtype=request.param)


def ids(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, CONFIG.vocab_size, (count,), generator=generator).tolist()


def test_a_mixed_step_equals_the_portable_model(model: NativeLlama):
    kv_dtype = next(model.new_kv_cache(1, BLOCK_SIZE).tensors()).dtype
    portable = Llama(random_weights(), torch.float32, kv_dtype=kv_dtype)
    prompt, other = ids(75), ids(150, seed=4)
    tables = [7, 3, 11, 0, 5, 9], [1, 2, 4, 6, 8, 10, 12, 13, 14, 15, 16]
    results = []
    for each in (model, portable):
        kv = each.new_kv_cache(20, BLOCK_SIZE)
        each.forward(make_batch((prompt, 0, tables[0])), kv)
        mixed = make_batch(([5], 75, tables[0]), (other, 0, tables[1]), every_row=True)
        results.append(each.forward(mixed, kv))
    # A value that lies between two codes may go either way.
    tolerance = 1e-4 if kv_dtype == torch.float32 else 1e-3
    torch.testing.assert_close(*results, rtol=tolerance, atol=tolerance)


def test_hidden_states_and_the_head_make_the_same_bits_as_a_step(model: NativeLlama):
    batch = make_batch((ids(9), 0, [0]), (ids(2, seed=1), 0, [1]), every_row=True)
    hidden = model.hidden_states(batch, model.new_kv_cache(2, BLOCK_SIZE))
    logits = model.forward(batch, model.new_kv_cache(2, BLOCK_SIZE))
    assert torch.equal(model.logits(hidden), logits)


def test_hidden_states_equal_those_of_the_portable_model(model: NativeLlama):
    batch = make_batch((ids(30), 0, [0, 1]), every_row=True)
    kv_dtype = next(model.new_kv_cache(1, BLOCK_SIZE).tensors()).dtype
    models = model, Llama(random_weights(), torch.float32, kv_dtype=kv_dtype)
    results = [m.hidden_states(batch, m.new_kv_cache(2, BLOCK_SIZE)) for m in models]
    tolerance = 1e-4 if kv_dtype == torch.float32 else 1e-2  # a value between two codes
    torch.testing.assert_close(*results, rtol=tolerance, atol=tolerance)


def test_the_head_takes_no_rows_and_refuses_rows_of_another_width(model: NativeLlama):
    assert model.logits(torch.empty(0, CONFIG.hidden_size)).shape == (0, CONFIG.vocab_size)
    with pytest.raises(ValueError, match="hidden must be"):
        model.logits(torch.empty(1, 3))


@pytest.mark.parametrize("kind", ["F32", "BF16", "Q8_0", "Q5_0"])
def test_other_weight_formats_equal_the_portable_model(kind: str):
    config = dataclasses.replace(CONFIG, hidden_size=256, num_heads=8, intermediate_size=256)
    weights = random_weights(kind, config)
    batch = make_batch((ids(20), 0, [1, 0]))
    models = NativeLlama(config, weights, threads=1), Llama(weights, torch.float32)
    results = [m.forward(batch, m.new_kv_cache(2, BLOCK_SIZE)) for m in models]
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
def test_rounded_activations_follow_the_portable_model(kind: str):
    """Inputs that differ in their last bit may round to different bytes, so the two are near, not equal."""
    weights, batch = random_weights(kind), make_batch((ids(20), 0, [1, 0]), every_row=True)
    models = (
        NativeLlama(CONFIG, weights, threads=1, activations="int8"),
        Llama(weights, torch.float32, activations="int8"),
        Llama(weights, torch.float32),
    )
    native_, portable, exact = (m.forward(batch, m.new_kv_cache(2, BLOCK_SIZE)) for m in models)
    assert (native_ - portable).abs().mean() < 0.3 * (exact - portable).abs().mean()


def test_rounded_activations_change_no_bit_of_a_row_with_its_neighbours():
    model = NativeLlama(CONFIG, random_weights(), threads=2, activations="int8")
    kv = model.new_kv_cache(100, BLOCK_SIZE)
    sequences = [(ids(10 + 7 * i, seed=i), list(range(8 * i, 8 * i + 8))) for i in range(11)]
    together = model.forward(make_batch(*((prompt, 0, table) for prompt, table in sequences)), kv)
    alone = [model.forward(make_batch((prompt, 0, table)), kv) for prompt, table in sequences]
    assert torch.equal(together, torch.cat(alone))


def test_an_untied_head_is_used(model: NativeLlama):
    weights = random_weights()
    head = random_weight("Q8_0", CONFIG.vocab_size, CONFIG.hidden_size, seed=77)
    untied = dataclasses.replace(weights, lm_head=head)
    batch = make_batch((ids(5), 0, [0]))
    models = NativeLlama(CONFIG, untied, threads=1), Llama(untied, torch.float32)
    results = [m.forward(batch, m.new_kv_cache(2, BLOCK_SIZE)) for m in models]
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(results[0], model.forward(batch, model.new_kv_cache(2, BLOCK_SIZE)))


def test_a_decode_row_has_the_same_bits_alone_and_in_a_batch(model: NativeLlama):
    kv = model.new_kv_cache(100, BLOCK_SIZE)
    sequences = [(ids(10 + 7 * i, seed=i), list(range(8 * i, 8 * i + 8))) for i in range(11)]
    for prompt, table in sequences:
        model.forward(make_batch((prompt, 0, table)), kv)
    steps = [([3 + i], len(prompt), table) for i, (prompt, table) in enumerate(sequences)]
    together = model.forward(make_batch(*steps), kv)
    alone = torch.cat([model.forward(make_batch(step), kv) for step in steps])
    assert torch.equal(together, alone)


@pytest.mark.parametrize("chunks", [[1] * 90, [64, 26], [17, 40, 33]])
def test_chunked_prefill_has_the_same_bits_as_one_pass(model: NativeLlama, chunks: list[int]):
    prompt, table = ids(90), [4, 2, 0, 1, 3, 5]
    whole = model.forward(
        make_batch((prompt, 0, table), every_row=True), model.new_kv_cache(6, BLOCK_SIZE)
    )
    kv, parts, past = model.new_kv_cache(6, BLOCK_SIZE), [], 0
    for size in chunks:
        batch = make_batch((prompt[past : past + size], past, table), every_row=True)
        parts.append(model.forward(batch, kv))
        past += size
    assert torch.equal(torch.cat(parts), whole)


def test_the_number_of_threads_changes_no_bit(model: NativeLlama):
    batch = make_batch((ids(90), 0, [0, 1, 2, 3, 4, 5]), every_row=True)
    kv_dtype = next(model.new_kv_cache(1, BLOCK_SIZE).tensors()).dtype
    single = NativeLlama(CONFIG, random_weights(), threads=1, kv_dtype=kv_dtype)
    many = NativeLlama(CONFIG, random_weights(), threads=5, kv_dtype=kv_dtype)
    results = [m.forward(batch, m.new_kv_cache(6, BLOCK_SIZE)) for m in (model, single, many)]
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_larger_blocks_hold_the_same_cache(model: NativeLlama):
    prompt = ids(70)
    small = model.forward(
        make_batch((prompt, 0, [4, 2, 0, 1, 3])), model.new_kv_cache(5, BLOCK_SIZE)
    )
    large_batch = make_batch((prompt, 0, [2, 0, 1]), block_size=32)
    assert torch.equal(model.forward(large_batch, model.new_kv_cache(3, 32)), small)


def test_whole_blocks_can_be_copied_to_another_place(model: NativeLlama):
    kv = model.new_kv_cache(8, BLOCK_SIZE)
    model.forward(make_batch((ids(40), 0, [0, 1, 2])), kv)
    for tensor in kv.tensors():
        tensor[:, 5:8] = tensor[:, 0:3].clone()
    here = model.forward(make_batch(([7], 40, [0, 1, 2])), kv)
    assert torch.equal(model.forward(make_batch(([7], 40, [5, 6, 7])), kv), here)


def test_stale_nan_in_a_reused_block_reaches_nobody(model: NativeLlama):
    clean, dirty = model.new_kv_cache(3, BLOCK_SIZE), model.new_kv_cache(3, BLOCK_SIZE)
    for tensor in dirty.tensors():
        tensor.fill_(float("nan") if tensor.is_floating_point() else -77)
    batch = make_batch((ids(37), 0, [2, 1, 0]), every_row=True)
    assert torch.equal(model.forward(batch, dirty), model.forward(batch, clean))


def test_a_nan_weight_reaches_the_logits():
    weights = random_weights()
    weights.norm[3] = float("nan")
    broken = NativeLlama(CONFIG, weights, threads=1)
    logits = broken.forward(make_batch((ids(3), 0, [0])), broken.new_kv_cache(1, BLOCK_SIZE))
    assert logits.isnan().all()


def test_a_step_that_wants_no_logits_still_fills_the_cache(model: NativeLlama):
    kv, silent = model.new_kv_cache(2, BLOCK_SIZE), model.new_kv_cache(2, BLOCK_SIZE)
    batch = make_batch((ids(20), 0, [0, 1]))
    model.forward(batch, kv)
    batch.logits_rows = torch.empty(0, dtype=torch.int64)
    assert model.forward(batch, silent).shape == (0, CONFIG.vocab_size)
    assert all(torch.equal(a, b) for a, b in zip(kv.tensors(), silent.tensors(), strict=True))


def test_the_cache_takes_the_bytes_that_were_announced(model: NativeLlama):
    kv = model.new_kv_cache(3, BLOCK_SIZE)
    held = sum(t.numel() * t.element_size() for t in kv.tensors())
    assert held == 3 * model.kv_bytes_per_block(BLOCK_SIZE)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("token_ids", torch.tensor([CONFIG.vocab_size])),
        ("token_ids", torch.tensor([-1])),
        ("slot_mapping", torch.tensor([2 * BLOCK_SIZE])),
        ("block_tables", torch.tensor([[2]], dtype=torch.int32)),
        ("context_lens", [0]),
        ("context_lens", [BLOCK_SIZE + 1]),
        ("query_start", [0, 2]),
        ("logits_rows", torch.tensor([1])),
        ("positions", torch.tensor([-1])),
        ("positions", torch.tensor([0, 1])),
    ],
)
def test_a_batch_that_points_outside_is_refused_by_name(
    model: NativeLlama, field: str, value: object
):
    batch = make_batch(([1], 0, [0]))
    setattr(batch, field, value)
    with pytest.raises(ValueError, match=field):
        model.forward(batch, model.new_kv_cache(2, BLOCK_SIZE))


def test_a_cache_of_another_shape_is_refused(model: NativeLlama):
    kv = model.new_kv_cache(2, BLOCK_SIZE)
    foreign = KVCache([torch.zeros(1, 2, BLOCK_SIZE, 32) for _ in kv.keys], kv.values, BLOCK_SIZE)
    with pytest.raises(ValueError, match="the cache of a layer must be contiguous"):
        model.forward(make_batch(([1], 0, [0])), foreign)


def test_a_block_size_that_is_no_multiple_of_sixteen_is_refused(model: NativeLlama):
    with pytest.raises(ValueError, match="multiple of 16, got 24"):
        model.new_kv_cache(2, 24)


def test_a_model_with_odd_heads_is_left_to_the_portable_tier():
    config = dataclasses.replace(CONFIG, head_dim=24)
    assert unsupported(config) == "head size 24 is no multiple of 16 up to 512"
    assert build_native(config, random_weights(), threads=1) is None
