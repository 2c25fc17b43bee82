from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch import Tensor

from backend.engine.engine import LLMEngine
from backend.engine.grammar import GrammarCompiler, TokenGrammar
from backend.engine.grammar_spec import MAX_PROPERTIES, GrammarSpec, InvalidGrammar
from backend.engine.params import GenerationRequest, StepOutput
from backend.models.batch import Batch, KVCache
from tests.backend.scripted_model import EOS, ScriptTokenizer
from tests.backend.toy_model import ToyModel, new_engine, request, run

PIECES = ['{"', '":', '", "', "true", "12", ": ", "é", "ab", "\n  "]
TOKENIZER = ScriptTokenizer([*({"t": text} for text in PIECES), {"special": "<mark>"}])
MARK = TOKENIZER.vocab_size - 1
COMPILER = GrammarCompiler(TOKENIZER)
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}, "b": {"enum": ["x", "yé", 3]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


class NoisyModel(ToyModel):
    """Any token is as likely as any other: noise made of the position and the token there."""

    def __init__(self, peak: int | None = None) -> None:
        super().__init__(max_position=2048, dim=1, num_layers=1)
        self.vocab_size = TOKENIZER.vocab_size + 5  # padded, as models are
        self._peak = peak

    def forward(self, batch: Batch, kv: KVCache) -> Tensor:
        rows = []
        for row in batch.logits_rows.tolist():
            seed = int(batch.positions[row]) * 1000 + int(batch.token_ids[row])
            rows.append(np.random.RandomState(seed).standard_normal(self.vocab_size) * 4)
            if self._peak is not None:
                rows[-1][self._peak] = 50.0
        return torch.from_numpy(np.array(rows, np.float32).reshape(-1, self.vocab_size))


def spec(schema: object, **fields: bool) -> GrammarSpec:
    return GrammarSpec("json_schema", json.dumps(schema), **fields)


def start(grammar: GrammarSpec, after: bytes = b"") -> TokenGrammar:
    return COMPILER.compile(grammar).start(after)


def constrained(
    request_id: str, grammar: GrammarSpec, prompt_ids: list[int] | None = None, **params: object
) -> GenerationRequest:
    settings = {"max_tokens": 200, "ignore_eos": False, **params}
    item = request(request_id, prompt_ids or [104, 105], **settings)  # pyright: ignore[reportArgumentType]
    item.grammar = start(grammar)
    return item


def engine(peak: int | None = None, **config: object) -> LLMEngine:
    return new_engine(NoisyModel(peak), TOKENIZER, **config)  # pyright: ignore[reportArgumentType]


def answer(grammar: GrammarSpec, **params: object) -> StepOutput:
    return run(engine(), constrained("r", grammar, **params))["r"]


def takes(grammar: GrammarSpec, text: str) -> bool:
    """Whether the grammar lets the text through, byte by byte, up to its end."""
    state, logits = start(grammar), np.zeros(TOKENIZER.vocab_size, np.float32)
    for byte in text.encode():
        logits[:] = 0.0
        state.apply(logits)
        if logits[byte] != 0.0:
            return False
        state.accept(byte)
    return True


@pytest.mark.parametrize("seed", range(8))
def test_whatever_the_model_wants_the_answer_obeys_the_schema(seed: int) -> None:
    output = answer(spec(SCHEMA), temperature=1.0, seed=seed)
    assert output.finish_reason == "stop"
    value = json.loads(output.text)
    assert list(value) == ["a", "b"]
    assert value["a"] in (True, False)
    assert value["b"] in ("x", "yé", 3)


def test_a_regex_holds() -> None:
    import re

    assert re.fullmatch(r"[a-c]{3}-\d", answer(GrammarSpec("regex", "[a-c]{3}-[0-9]")).text)


def test_a_choice_holds() -> None:
    grammar = GrammarSpec("choice", '["ja \\"é\\"", "nein"]')
    texts = {answer(grammar, temperature=2.0, seed=seed).text for seed in range(10)}
    assert texts == {'ja "é"', "nein"}


def test_a_lark_grammar_holds() -> None:
    assert answer(GrammarSpec("lark", 'start: "ab" DIGIT\nDIGIT: "7"')).text == "ab7"


def test_a_gbnf_grammar_holds() -> None:
    assert answer(GrammarSpec("lark", 'root ::= "ab" ("1" | "2")')).text in ("ab1", "ab2")


def test_the_answer_ends_with_the_grammar_even_where_the_end_token_is_ignored() -> None:
    output = answer(GrammarSpec("regex", "ab"), ignore_eos=True)
    assert (output.text, output.finish_reason) == ("ab", "stop")


def test_the_end_token_is_legal_where_the_grammar_may_end() -> None:
    output = run(engine(peak=EOS), constrained("r", GrammarSpec("regex", "a{3,50}")))["r"]
    assert (output.text, output.finish_reason) == ("aaa", "stop")


def test_min_tokens_keeps_a_grammar_from_ending_as_long_as_it_can_go_on() -> None:
    output = run(engine(EOS), constrained("r", GrammarSpec("regex", "a{3,50}"), min_tokens=9))["r"]
    assert len(output.text) >= 8


def test_a_grammar_that_must_end_ends_before_min_tokens() -> None:
    assert answer(GrammarSpec("regex", "a?"), min_tokens=9, temperature=2.0).finish_reason == "stop"


def test_max_tokens_cuts_json_and_says_so() -> None:
    output = answer(spec(SCHEMA), max_tokens=2)
    assert output.finish_reason == "length"
    assert output.num_output_tokens == 2


def test_a_stop_string_still_ends_the_answer() -> None:
    output = answer(GrammarSpec("regex", "xyz+"), stop=("y",))
    assert (output.text, output.stop_reason) == ("x", "y")


def test_logprobs_are_those_of_the_raw_logits() -> None:
    output = answer(GrammarSpec("regex", "q"), logprobs=1)
    (entry,) = output.logprobs
    assert entry.token_id == ord("q")
    assert entry.logprob < entry.top[0][1]
    assert entry.top[0][0] != entry.token_id


def test_a_token_past_the_vocabulary_is_never_legal() -> None:
    logits = np.zeros(TOKENIZER.vocab_size + 64, np.float32)
    start(GrammarSpec("regex", "(.|\n)*")).apply(logits)
    assert logits[ord("a")] == 0.0
    assert np.isneginf(logits[TOKENIZER.vocab_size :]).all()


def test_special_tokens_are_no_text() -> None:
    logits = np.zeros(TOKENIZER.vocab_size, np.float32)
    start(GrammarSpec("regex", "(.|\n)+")).apply(logits)
    assert np.isneginf(logits[MARK])


def test_whitespace_is_bounded() -> None:
    assert takes(spec(SCHEMA), '{"a": true,\n  "b": 3}')
    assert not takes(spec(SCHEMA), '{  "a"')
    assert not takes(spec(SCHEMA), '{\n\n"a"')
    assert not takes(spec(SCHEMA), '\n{"a"')


def test_accepting_and_rolling_back_leaves_no_trace() -> None:
    state, other = start(spec(SCHEMA)), start(spec(SCHEMA))
    for token in b'{"a":':
        state.accept(token)
        other.accept(token)
    for token in b" true,":
        state.accept(token)
    state.rollback(6)
    masks = [np.zeros(TOKENIZER.vocab_size, np.float32) for _ in range(2)]
    state.apply(masks[0])
    other.apply(masks[1])
    assert (masks[0] == masks[1]).all()


def test_requests_do_not_share_their_place_in_one_grammar() -> None:
    items = [
        constrained(str(i), spec(SCHEMA), temperature=1.0, seed=i, max_tokens=200) for i in range(5)
    ]
    together = run(engine(), *items)
    for i in range(5):
        assert together[str(i)].text == answer(spec(SCHEMA), temperature=1.0, seed=i).text


@pytest.mark.parametrize("config", [{"num_blocks": 14}, {"max_num_batched_tokens": 3}])
def test_preemption_and_chunks_change_nothing(config: dict[str, int]) -> None:
    grammar = spec({"type": "array", "items": {"type": "integer"}, "minItems": 6, "maxItems": 9})
    prompts = [[100 + i] * 11 for i in range(4)]

    def outputs(**settings: object) -> dict[str, StepOutput]:
        it = engine(**settings)
        items = [
            constrained(str(i), grammar, prompt, temperature=0.7, seed=i, max_tokens=36)
            for i, prompt in enumerate(prompts)
        ]
        result = run(it, *items)
        if "num_blocks" in settings:
            assert it.stats().num_preemptions > 0
        return result

    small, large = outputs(**config), outputs()
    assert {k: v.text for k, v in small.items()} == {k: v.text for k, v in large.items()}


class Repeating(NoisyModel):
    """Says a letter's neighbour, from a to d and round again; every other token is noise."""

    def forward(self, batch: Batch, kv: KVCache) -> Tensor:
        logits = super().forward(batch, kv)
        for row, token in enumerate(batch.token_ids[batch.logits_rows].tolist()):
            logits[row, ord("abcd"[(token + 4 - ord("a")) % 4])] += 100.0
        return logits


@pytest.mark.parametrize("how", ["ngram", "draft"])
@pytest.mark.parametrize("budget", [5, 512])
def test_a_grammar_beside_guesses_changes_neither(how: str, budget: int) -> None:
    grammar = spec({"type": "array", "items": {"type": "integer"}, "minItems": 5, "maxItems": 7})
    settings = {"ignore_eos": True, "max_tokens": 40, "logprobs": 1, "prompt_logprobs": 1}

    def speculating() -> LLMEngine:
        config = {"max_num_batched_tokens": budget}
        if how == "draft":
            return new_engine(Repeating(), TOKENIZER, Repeating(), **config)  # pyright: ignore[reportArgumentType]
        return new_engine(Repeating(), TOKENIZER, speculative=how, **config)  # pyright: ignore[reportArgumentType]

    def items() -> list[GenerationRequest]:
        held = constrained("held", grammar, list(b"12,34,12,34,12,3"), **settings)
        return [held, request("free", list(b"abcdabcd"), **settings)]

    alone = {
        item.request_id: run(new_engine(Repeating(), TOKENIZER), item)[item.request_id]  # pyright: ignore[reportArgumentType]
        for item in items()
    }
    together = run(speculating(), *items())
    assert 5 <= len(json.loads(together["held"].text)) <= 7
    for name, out in together.items():
        assert (out.token_ids, out.text) == (alone[name].token_ids, alone[name].text)
        assert out.finish_reason == alone[name].finish_reason
        assert [e.token_id for e in out.prompt_logprobs][1:] == [
            e.token_id for e in alone[name].prompt_logprobs
        ][1:]
    assert together["held"].num_accepted_tokens > 0
    assert together["free"].num_accepted_tokens > 10


def test_before_the_marker_everything_is_legal() -> None:
    state = start(GrammarSpec("regex", "ok"), after=b"</think>")
    logits = np.zeros(TOKENIZER.vocab_size, np.float32)
    for token in b"free</think":
        state.apply(logits)
        assert (logits == 0.0).all()
        state.accept(token)
    state.accept(ord(">"))
    state.apply(logits)
    assert {i for i in range(TOKENIZER.vocab_size) if logits[i] == 0.0} == {ord("o")}


def test_rolling_back_over_the_marker_makes_everything_legal_again() -> None:
    state = start(GrammarSpec("regex", "ok"), after=b"!")
    for token in b"a!o":
        state.accept(token)
    state.rollback(2)
    logits = np.zeros(TOKENIZER.vocab_size, np.float32)
    state.apply(logits)
    assert (logits == 0.0).all()


def test_a_fault_in_the_grammar_ends_only_its_own_request() -> None:
    broken, fine = constrained("broken", spec(SCHEMA)), constrained("fine", spec(SCHEMA))
    assert broken.grammar is not None
    broken.grammar.accept(ord("!"))  # a token it does not allow
    outputs = run(engine(), broken, fine)
    assert outputs["broken"].finish_reason == "error"
    assert "grammar" in outputs["broken"].error
    assert outputs["fine"].finish_reason == "stop"


def test_a_marker_shows_a_special_token_in_the_text() -> None:
    item = constrained("r", GrammarSpec("lark", f'start: "a" <[{MARK}]> "b"'))
    item.markers = {MARK: b"<mark>"}
    assert run(engine(), item)["r"].text == "a<mark>b"


@pytest.mark.parametrize(
    ("grammar", "fault"),
    [
        (spec({"type": "object", "properties": {"a": {"$ref": "http://h/x"}}}), "http://h/x"),
        (spec({"$ref": "#/$defs/none"}), "/$defs/none"),
        (spec({"type": "string", "pattern": "foo**"}), "multiple repeat"),
        (spec({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (GrammarSpec("regex", "(foo"), "unclosed group"),
        (GrammarSpec("lark", "start: nope"), "nope"),
        (GrammarSpec("lark", "root ::= nope"), "nope"),
        (GrammarSpec("lark", "what is this"), "neither"),
        (GrammarSpec("lark", "start: start"), "nothing can match"),
        (spec({"$ref": "#"}), "nothing can match"),
        (GrammarSpec("regex", "a" * 600_000), "600000 characters"),
        (
            spec({"properties": {str(i): {} for i in range(MAX_PROPERTIES + 1)}}),
            f"more than {MAX_PROPERTIES} properties",
        ),
        (spec({"enum": list(range(5001))}), "5000"),
    ],
)
def test_a_grammar_that_cannot_be_used_is_refused_in_one_line(
    grammar: GrammarSpec, fault: str
) -> None:
    with pytest.raises(InvalidGrammar) as caught:
        COMPILER.compile(grammar)
    assert fault in str(caught.value)
    assert "\n" not in str(caught.value)


def test_keywords_that_cannot_be_enforced_pass_where_the_schema_is_not_strict() -> None:
    assert takes(spec({"type": "array", "uniqueItems": True}, lenient=True), "[1,1]")


def test_a_compiled_grammar_is_kept() -> None:
    grammar = GrammarSpec("regex", "kept")
    assert not COMPILER.has(grammar)
    assert COMPILER.compile(grammar) is COMPILER.compile(grammar)
    assert COMPILER.has(grammar)
