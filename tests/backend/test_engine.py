from __future__ import annotations

import itertools
import math
import random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from backend.engine.config import EngineConfig, kv_cache_blocks
from backend.engine.engine import InvalidGeneration, LLMEngine
from backend.engine.params import GenerationRequest, RequestClass, StepOutput
from backend.models.batch import Batch, KVCache
from tests.backend.toy_model import (
    EOS,
    ScriptModel,
    ToyModel,
    ToyTokenizer,
    joined,
    new_engine,
    request,
    run,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def prompts(count: int, seed: int = 1, longest: int = 40) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(1, 64) for _ in range(rng.randint(1, longest))] for _ in range(count)]


_ALONE: dict[bytes, StepOutput] = {}


def alone(requests: list[GenerationRequest]) -> dict[str, StepOutput]:
    """Each on a fresh engine of its own: what every other way of running it must equal."""
    outputs: dict[str, StepOutput] = {}
    for item in requests:
        key = msgspec.msgpack.encode(item)
        if key not in _ALONE:
            _ALONE[key] = run(new_engine(), item)[item.request_id]
        outputs[item.request_id] = _ALONE[key]
    return outputs


def texts(outputs: dict[str, StepOutput]) -> dict[str, tuple[list[int], str, Any]]:
    return {key: (out.token_ids, out.text, out.finish_reason) for key, out in outputs.items()}


def greedy(count: int = 32, **params: Any) -> list[GenerationRequest]:
    return [
        request(str(i), ids, max_tokens=8 + i % 9, **params) for i, ids in enumerate(prompts(count))
    ]


def sampled(count: int = 12, **params: Any) -> list[GenerationRequest]:
    return [
        request(str(i), ids, temperature=1.0, seed=i, max_tokens=16, **params)
        for i, ids in enumerate(prompts(count))
    ]


# Batching, chunking, preemption and the prefix cache never show in the text


def test_requests_run_together_as_they_run_alone():
    assert texts(run(new_engine(), *greedy())) == texts(alone(greedy()))


@pytest.mark.parametrize("budget", [1, 3, 512])
def test_the_chunk_size_never_shows(budget: int):
    outputs = run(new_engine(max_num_batched_tokens=budget), *greedy(12))
    assert texts(outputs) == texts(alone(greedy(12)))


@pytest.mark.parametrize("budget", [7, 512])
def test_a_tiny_pool_with_preemption_gives_the_same_text(budget: int):
    engine = new_engine(num_blocks=15, max_num_batched_tokens=budget)
    outputs = run(engine, *greedy())
    assert engine.stats().num_preemptions > 0
    assert texts(outputs) == texts(alone(greedy()))


def test_preemption_without_a_prefix_cache_gives_the_same_text():
    engine = new_engine(num_blocks=15, enable_prefix_cache=False)
    outputs = run(engine, *greedy())
    assert engine.stats().num_preemptions > 0
    assert texts(outputs) == texts(alone(greedy()))


def test_a_prefix_hit_gives_the_same_text_as_a_cold_run():
    engine = new_engine()
    cold = texts(run(engine, *greedy()))
    num_cached_before = engine.stats().num_cached_tokens
    assert texts(run(engine, *greedy())) == cold
    assert engine.stats().num_cached_tokens > num_cached_before


@pytest.mark.parametrize("length", [4, 8, 16])
def test_a_fully_cached_prompt_of_whole_blocks_gives_the_same_text(length: int):
    engine, ids = new_engine(), list(range(1, length + 1))
    cold = run(engine, request("cold", ids))["cold"]
    warm = run(engine, request("warm", ids))["warm"]
    assert warm.token_ids == cold.token_ids
    assert warm.num_cached_tokens == length - 4


def test_choices_of_one_prompt_compute_it_once():
    model, ids = ToyModel(), list(range(1, 30))
    engine = new_engine(model)
    run(engine, *[request(str(i), ids, temperature=1.0, seed=i, max_tokens=2) for i in range(8)])
    assert sum(model.num_tokens_seen) == 29 + 7 * 1 + 8  # 28 of 29 tokens are shared


def test_seeded_text_does_not_depend_on_neighbours_or_preemption():
    engine = new_engine(num_blocks=15, max_num_batched_tokens=9)
    outputs = run(engine, *sampled())
    assert engine.stats().num_preemptions > 0
    assert texts(outputs) == texts(alone(sampled()))


def test_penalties_survive_preemption():
    params = {"presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.3}
    engine = new_engine(num_blocks=15)
    outputs = run(engine, *greedy(**params))
    assert engine.stats().num_preemptions > 0
    assert texts(outputs) == texts(alone(greedy(**params)))
    assert texts(outputs) != texts(alone(greedy()))


def test_other_seeds_give_other_text_and_no_seed_gives_fresh_text():
    engine = new_engine()
    seeds = [5, 5, 6, None, None]
    outputs = run(
        engine,
        *[
            request(str(i), [1, 2, 3], temperature=1.5, seed=seed, max_tokens=20)
            for i, seed in enumerate(seeds)
        ],
    )
    assert outputs["0"].token_ids == outputs["1"].token_ids
    assert len({tuple(out.token_ids) for out in outputs.values()}) == 4


def test_another_salt_does_not_find_the_prefix():
    engine, ids = new_engine(), list(range(1, 14))
    run(engine, request("a", ids, cache_salt=b"one"))
    assert run(engine, request("b", ids, cache_salt=b"two"))["b"].num_cached_tokens == 0
    assert run(engine, request("c", ids, cache_salt=b"one"))["c"].num_cached_tokens == 12


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_random_arrivals_and_aborts_leak_nothing_and_change_no_text(data: st.DataObject):
    requests = [
        request(
            str(i),
            ids,
            RequestClass(data.draw(st.integers(0, 3))),
            max_tokens=data.draw(st.integers(1, 12)),
        )
        for i, ids in enumerate(
            data.draw(st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=20), max_size=8))
        )
    ]
    tick_s = data.draw(st.sampled_from([0.0, 0.01, 5.0]))  # between two looks at the clock
    engine = new_engine(
        clock=itertools.count(0.0, tick_s).__next__,
        num_blocks=data.draw(st.integers(8, 20)),
        max_num_seqs=data.draw(st.integers(1, 6)),
        max_num_batched_tokens=data.draw(st.sampled_from([1, 5, 64])),
    )
    pending, outputs, aborted = list(requests), list[StepOutput](), set[str]()
    while pending or engine.has_work:
        for _ in range(data.draw(st.integers(0 if engine.has_work else 1, 3))):
            if pending:
                engine.add(pending.pop(0))
        if requests and data.draw(st.integers(0, 9)) == 0:
            aborted.add(data.draw(st.sampled_from(requests)).request_id)
            for request_id in sorted(aborted):
                engine.abort(request_id)
        outputs += engine.step()
    assert engine.stats().num_free_blocks == engine.stats().num_blocks
    expected = alone(requests)
    for request_id, out in joined(outputs).items():
        if request_id in aborted:
            assert out.token_ids == expected[request_id].token_ids[: len(out.token_ids)]
        else:
            assert texts({"": out}) == texts({"": expected[request_id]})


class WatchedModel(ToyModel):
    """Keeps the block tables of every step."""

    def __init__(self) -> None:
        super().__init__()
        self.block_tables: list[list[list[int]]] = []

    def forward(self, batch: Batch, kv: KVCache) -> Tensor:
        self.block_tables.append(batch.block_tables.tolist())
        return super().forward(batch, kv)


def test_block_tables_are_padded_with_zero_even_in_a_used_slot():
    model = WatchedModel()
    engine = new_engine(model, max_num_seqs=2)
    run(engine, request("a", [1] * 40), request("b", [2] * 40))
    run(engine, request("short", [3], max_tokens=1), request("long", [4] * 20, max_tokens=1))
    (short, _) = model.block_tables[-1]
    assert short[1:] == [0] * 4


# Lengths


def test_no_max_tokens_runs_to_the_end_of_the_context():
    engine = new_engine(ToyModel(max_position=32))
    out = run(engine, request("a", [1] * 10, max_tokens=None))["a"]
    assert (out.num_output_tokens, out.finish_reason) == (22, "length")


def test_a_prompt_one_short_of_the_context_yields_one_token():
    engine = new_engine(ToyModel(max_position=32))
    out = run(engine, request("a", [1] * 31, max_tokens=None))["a"]
    assert (out.num_output_tokens, out.finish_reason) == (1, "length")


def test_prompt_and_max_tokens_that_fill_the_context_exactly_run():
    engine = new_engine(ToyModel(max_position=32))
    assert run(engine, request("a", [1] * 20, max_tokens=12))["a"].num_output_tokens == 12


def test_a_request_that_fills_the_whole_pool_runs_alone_and_in_company():
    engine = new_engine(num_blocks=8)
    outputs = run(engine, *[request(str(i), [i + 1] * 20, max_tokens=12) for i in range(3)])
    assert {out.num_output_tokens for out in outputs.values()} == {12}


def test_the_context_is_no_longer_than_the_pool():
    assert new_engine(num_blocks=8).max_model_len == 32


def test_a_context_longer_than_the_pool_is_refused_with_both_numbers():
    with pytest.raises(ValueError, match="max_model_len is 64, and the KV cache holds 32 tokens"):
        new_engine(num_blocks=8, max_model_len=64)


def test_a_context_longer_than_the_model_is_refused_with_both_numbers():
    with pytest.raises(ValueError, match="max_model_len is 1024, the model was made for 512"):
        new_engine(max_model_len=1024)


@pytest.mark.parametrize(
    "field", ["block_size", "max_num_seqs", "max_num_batched_tokens", "num_blocks", "kv_cache_gb"]
)
def test_a_config_that_cannot_be_is_refused_by_name(field: str):
    with pytest.raises(ValueError, match=field):
        EngineConfig(**{field: 0})


def test_memory_is_turned_into_blocks():
    assert kv_cache_blocks(EngineConfig(kv_cache_gb=0.001), bytes_per_block=300_000) == 3
    assert kv_cache_blocks(EngineConfig(), bytes_per_block=2**20) > 0


def test_memory_too_small_for_one_block_is_refused():
    with pytest.raises(ValueError, match="one block of 16 tokens takes 300000"):
        kv_cache_blocks(EngineConfig(kv_cache_gb=0.0001), bytes_per_block=300_000)


# Requests that can never run


@pytest.mark.parametrize(
    ("prompt", "params", "param", "words"),
    [
        ([], {}, "prompt", "at least one token"),
        ([1] * 32, {}, "prompt", "32 tokens; the prompt has 32"),
        (
            [1] * 20,
            {"max_tokens": 13},
            "max_tokens",
            "32 tokens; the prompt has 20 and max_tokens asks for 13: 33",
        ),
        ([1, 64], {}, "prompt", "token id 64; the vocabulary has 64"),
        ([-1], {}, "prompt", "token id -1"),
        ([1], {"logit_bias": {64: 1.0}}, "logit_bias", "token id 64"),
        ([1], {"logit_bias": {1: 101.0}}, "logit_bias", "-100 and 100, got 101"),
        ([1], {"stop_token_ids": (99,)}, "stop_token_ids", "token id 99"),
        ([1], {"stop": ("",)}, "stop", "1 to 4096 characters"),
        ([1], {"stop": ("x",) * 33}, "stop", "holds 33 strings, the limit is 32"),
        ([1], {"temperature": -0.1}, "temperature", "between 0.0 and 2.0, got -0.1"),
        ([1], {"temperature": math.nan}, "temperature", "got nan"),
        ([1], {"top_p": 1.1}, "top_p", "between 0.0 and 1.0"),
        ([1], {"top_k": -2}, "top_k", "got -2"),
        ([1], {"min_p": 2.0}, "min_p", "got 2.0"),
        ([1], {"presence_penalty": 2.5}, "presence_penalty", "-2.0 and 2.0"),
        ([1], {"repetition_penalty": 0.0}, "repetition_penalty", "got 0.0"),
        ([1], {"logprobs": 21}, "logprobs", "between 0 and 20"),
        ([1], {"max_tokens": 0}, "max_tokens", "got 0"),
        ([1], {"min_tokens": 13}, "min_tokens", "13 is above max_tokens 12"),
        ([1], {"seed": 2**63}, "seed", "got 9223372036854775808"),
    ],
)
def test_an_impossible_request_is_refused_by_field_and_limit(
    prompt: list[int], params: dict[str, Any], param: str, words: str
):
    engine = new_engine(ToyModel(max_position=32))
    with pytest.raises(InvalidGeneration) as caught:
        engine.add(request("a", prompt, **params))
    assert caught.value.param == param
    assert words in str(caught.value)
    assert not engine.has_work


def test_a_request_id_in_use_is_refused_and_the_first_goes_on():
    engine = new_engine()
    engine.add(request("a", [1, 2]))
    with pytest.raises(InvalidGeneration, match="'a' is already being generated"):
        engine.add(request("a", [3]))
    assert len(run(engine)["a"].token_ids) == 12


def test_a_finished_request_id_may_come_again():
    engine = new_engine()
    assert run(engine, request("a", [1]))["a"].text == run(engine, request("a", [1]))["a"].text


# Ends


def scripted(pieces: list[bytes], tokens: list[int], **params: Any) -> StepOutput:
    """The output of a model that answers a one-token prompt with `tokens`, and then with token 1 for ever."""
    model = ScriptModel(
        lambda position, _: tokens[position] if position < len(tokens) else 1, len(pieces)
    )
    engine = new_engine(model, ToyTokenizer(pieces))
    return run(engine, request("a", [1], **{"max_tokens": 50, "ignore_eos": False, **params}))["a"]


ALPHABET = [b"", *(bytes([65 + i]) for i in range(26))]


def test_the_end_of_turn_ends_the_text_and_is_counted():
    out = scripted(ALPHABET, [1, 2, EOS], logprobs=0)
    assert (out.text, out.finish_reason, out.stop_reason) == ("AB", "stop", None)
    assert (out.token_ids, out.num_output_tokens) == ([1, 2, EOS], 3)
    assert [entry.token_id for entry in out.logprobs] == [1, 2]


def test_the_end_of_turn_is_passed_over_on_request():
    out = scripted(ALPHABET, [1, EOS, 2], ignore_eos=True, max_tokens=3)
    assert (out.text, out.finish_reason) == ("AB", "length")


def test_min_tokens_puts_off_the_end_of_turn():
    out = scripted(ALPHABET, [EOS, EOS, EOS], min_tokens=2)
    assert out.num_output_tokens == 3
    assert out.token_ids[2] == EOS


def test_a_stop_token_ends_the_text_and_is_not_shown():
    out = scripted(ALPHABET, [1, 2, 3, 4], stop_token_ids=(3,))
    assert (out.text, out.finish_reason, out.stop_reason) == ("AB", "stop", 3)


def test_a_stop_string_over_several_tokens_is_never_shown():
    out = scripted(ALPHABET, list(range(1, 27)), stop=("DEFGHIJ",))
    assert (out.text, out.finish_reason, out.stop_reason) == ("ABC", "stop", "DEFGHIJ")
    assert out.num_output_tokens == 10


def test_a_stop_string_that_begins_inside_a_word_cuts_the_word():
    pieces = [b"", b"The", b" quick", b" brown", b" fox", b" jumps"]
    assert scripted(pieces, [1, 2, 3, 4, 5], stop=("own fox",)).text == "The quick br"


def test_a_stop_string_on_the_last_token_wins_over_the_length():
    out = scripted(ALPHABET, [1, 2, 3], stop=("BC",), max_tokens=3)
    assert (out.text, out.finish_reason) == ("A", "stop")


def test_held_text_is_released_at_the_length():
    out = scripted(ALPHABET, [1, 2, 3], stop=("CD",), max_tokens=3)
    assert (out.text, out.finish_reason) == ("ABC", "length")


def test_a_stop_string_before_min_tokens_does_not_end_the_text():
    out = scripted(ALPHABET, [1, 2, 1, 2], stop=("B",), min_tokens=3)
    assert (out.text, out.num_output_tokens) == ("ABA", 4)


def test_an_emoji_of_three_tokens_arrives_whole():
    pieces = [b"", b"a", b"\xf0\x9f", b"\x98", b"\x80"]
    model = ScriptModel(lambda position, _: [2, 3, 4, EOS][position], len(pieces))
    engine = new_engine(model, ToyTokenizer(pieces))
    engine.add(request("a", [1], ignore_eos=False))
    shown = []
    while engine.has_work:
        shown += [output.text for output in engine.step()]
    assert shown == ["", "", "\U0001f600", ""]


def test_a_character_cut_off_by_the_length_becomes_one_replacement():
    assert scripted([b"", b"a", b"\xf0\x9f"], [1, 2], max_tokens=2).text == "a\ufffd"


def test_stray_bytes_become_replacements():
    assert scripted([b"", b"a", b"\xff"], [1, 2, 2, 1, EOS]).text == "a\ufffd\ufffda"


def test_logit_bias_steers_the_text():
    out = scripted(ALPHABET, [1, 1, EOS], logit_bias={5: 100.0}, max_tokens=3)
    assert out.text == "EEE"


def test_logprobs_are_sorted_and_include_the_greedy_choice():
    out = run(new_engine(), request("a", [1, 2, 3], logprobs=3))["a"]
    assert len(out.logprobs) == 12
    for token_id, entry in zip(out.token_ids, out.logprobs, strict=True):
        values = [value for _, value in entry.top]
        assert (entry.token_id, entry.top[0][0]) == (token_id, token_id)
        assert values == sorted(values, reverse=True)
        assert entry.logprob == values[0] <= 0.0


def test_logprobs_do_not_depend_on_temperature_or_top_p():
    plain = run(new_engine(), request("a", [1, 2, 3], logprobs=3, max_tokens=1))["a"].logprobs[0]
    shaped = run(
        new_engine(), request("a", [1, 2, 3], logprobs=3, max_tokens=1, temperature=0.2, top_p=0.1)
    )["a"].logprobs[0]
    assert shaped.top == plain.top


# Aborts


def test_abort_before_the_first_step_leaves_nothing():
    engine = new_engine()
    engine.add(request("a", [1, 2]))
    engine.abort("a")
    assert not engine.has_work
    assert engine.step() == []


@pytest.mark.parametrize("num_steps", [1, 2, 5])
def test_abort_in_prefill_or_decode_frees_the_blocks_at_once(num_steps: int):
    engine = new_engine(max_num_batched_tokens=8)
    engine.add(request("a", [1] * 20))
    for _ in range(num_steps):
        engine.step()
    engine.abort("a")
    assert engine.stats().num_free_blocks == engine.stats().num_blocks
    assert engine.step() == []


def test_abort_while_preempted_leaves_nothing():
    engine = new_engine(num_blocks=8)
    engine.add(request("a", [1] * 12, max_tokens=20))
    engine.add(request("b", [2] * 12, max_tokens=20))
    while engine.stats().num_preemptions == 0:
        engine.step()
    assert engine.stats().num_waiting == 1
    engine.abort("b")
    assert len(run(engine)["a"].token_ids) < 20  # the rest of what it had begun


def test_abort_of_unknown_and_finished_ids_is_ignored():
    engine = new_engine()
    run(engine, request("a", [1]))
    engine.abort("a")
    engine.abort("never seen")


def test_an_aborted_neighbour_changes_no_text():
    engine, (keep, drop) = new_engine(), greedy(2)
    engine.add(keep)
    engine.add(drop)
    outputs = engine.step()
    engine.abort(drop.request_id)
    while engine.has_work:
        outputs += engine.step()
    assert texts({"": joined(outputs)[keep.request_id]}) == texts(
        {"": alone([keep])[keep.request_id]}
    )


# Faults


class FaultyModel(ToyModel):
    """Raises in the forwards named; writes NaN for every row that holds `poison`."""

    def __init__(self, raises_at: frozenset[int] = frozenset(), poison: int = -1) -> None:
        super().__init__()
        self._raises_at, self._poison = raises_at, poison

    def forward(self, batch: Batch, kv: KVCache) -> Tensor:
        if self.num_forwards in self._raises_at:
            self.num_forwards += 1
            raise RuntimeError("out of memory")
        poisoned = batch.token_ids == self._poison
        self._embed[self._poison] = math.nan if bool(poisoned.any()) else 0.0
        return super().forward(batch, kv)


def test_a_fault_in_the_model_ends_the_requests_of_that_step_and_no_later_one(
    caplog: pytest.LogCaptureFixture,
):
    engine = new_engine(FaultyModel(raises_at=frozenset({2})))
    outputs = run(engine, request("a", [1, 2]), request("b", [3, 4]))
    assert {out.finish_reason for out in outputs.values()} == {"error"}
    assert "out of memory" in outputs["a"].error
    assert "a step of 2 requests failed" in caplog.text
    assert run(engine, request("c", [1, 2]))["c"].finish_reason == "length"


def test_logits_that_are_not_numbers_end_that_request_alone():
    engine = new_engine(FaultyModel(poison=63))
    outputs = run(engine, request("bad", [1, 63, 2]), request("good", [5, 6, 7]))
    assert (outputs["bad"].finish_reason, outputs["good"].finish_reason) == ("error", "length")
    assert (
        outputs["good"].token_ids == run(new_engine(), request("good", [5, 6, 7]))["good"].token_ids
    )


def test_blocks_that_held_nan_are_not_inherited():
    engine = new_engine(FaultyModel(poison=63), num_blocks=4)
    assert run(engine, request("bad", [63] * 9, max_tokens=1))["bad"].finish_reason == "error"
    assert (
        run(engine, request("next", [1, 2, 3, 4, 5], max_tokens=8))["next"].finish_reason
        == "length"
    )


def test_blocks_that_held_nan_are_not_found_again():
    engine = new_engine(
        FaultyModel(poison=63), max_num_batched_tokens=4
    )  # published before the logits are seen
    for name in ("bad", "bad again"):
        out = run(engine, request(name, [63] * 9, max_tokens=1))[name]
        assert (out.finish_reason, out.num_cached_tokens) == ("error", 0)


def test_only_the_model_sees_a_padded_vocabulary():
    model = ScriptModel(lambda position, token_id: 70 if position < 3 else 5, vocab_size=80)
    assert run(new_engine(model), request("a", [1], max_tokens=5))["a"].num_output_tokens == 5


# Statistics


def test_stats_count_what_was_done():
    engine = new_engine()
    run(engine, request("a", list(range(1, 11)), max_tokens=3))
    run(engine, request("b", list(range(1, 11)), max_tokens=3))
    stats = engine.stats()
    assert (stats.num_prompt_tokens, stats.num_output_tokens, stats.num_cached_tokens) == (20, 6, 8)
    assert (stats.num_steps, stats.num_running, stats.num_waiting) == (6, 0, 0)


def test_stats_count_requests_by_class():
    engine = new_engine(max_num_seqs=2)
    for i, klass in enumerate([RequestClass.INTERACTIVE, *[RequestClass.BATCH] * 3]):
        engine.add(request(str(i), [1, 2, 3], klass))
    engine.step()
    stats = engine.stats()
    assert stats.running_by_class == (1, 0, 0, 1)
    assert stats.waiting_by_class == (0, 0, 0, 2)


def test_stats_count_evicted_blocks():
    engine = new_engine(num_blocks=8)
    for i in range(3):
        run(engine, request(str(i), [i + 1] * 16, max_tokens=2))
    assert engine.stats().num_evictions > 0


def test_every_class_comes_to_its_end_while_time_passes():
    """Each look at the clock takes 10 ms, so a step takes 10 ms whatever is in it: rows cost nothing."""
    engine = new_engine(clock=itertools.count(0.0, 0.01).__next__)
    requests = [request(str(i), [i + 1] * 5, RequestClass(i % 4), max_tokens=8) for i in range(8)]
    assert {out.num_output_tokens for out in run(engine, *requests).values()} == {8}


def test_stats_say_how_long_the_oldest_request_has_waited():
    times = iter([10.0, 11.5, 14.0])
    engine = LLMEngine(ToyModel(), ToyTokenizer(), EngineConfig(num_blocks=8), clock=times.__next__)
    engine.add(request("a", [1]))
    engine.add(request("b", [1]))
    assert engine.stats().oldest_waiting_s == 4.0
