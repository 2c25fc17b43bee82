from __future__ import annotations

import math

import pytest

from backend.engine.params import StepOutput, TokenLogprob
from backend.logprobs import LogprobGate


class Tokenizer:
    pieces = (b"<s>", b"ab", b"c", b"\xf0\x9f", b"\x98\x80", b"\x80", b"\xff")

    def token_bytes(self, token_id: int) -> bytes:
        return self.pieces[token_id] if token_id else b""

    def token_text(self, token_id: int) -> str:
        return self.pieces[token_id].decode(errors="replace")


def offsets(echo: str, prompt: list[int]) -> list[int]:
    entries = [TokenLogprob(token_id, math.nan) for token_id in prompt]
    output = StepOutput(
        "r", [2], "c", [TokenLogprob(2, -1.0)], prompt_logprobs=entries, finish_reason="length"
    )
    return [entry.text_offset for entry in LogprobGate(Tokenizer(), echo).pass_through(output)]


def test_a_special_token_that_the_text_spells_takes_its_room():
    assert offsets("<s>abc", [0, 1, 2]) == [0, 3, 5, 6]


def test_a_special_token_that_was_added_takes_none():
    assert offsets("abc", [0, 1, 2]) == [0, 0, 2, 3]


def test_a_prompt_without_text_still_has_its_entries():
    assert offsets("", [0]) == [0, 0]


def test_the_answer_begins_behind_the_echo_even_if_its_tokens_spell_it_otherwise():
    assert offsets("abcc", [1, 2]) == [0, 2, 4]


@pytest.mark.parametrize(
    ("token_ids", "begins"),
    [
        ([1, 3, 4, 2], [0, 2, 2, 3]),  # ab😀c
        ([3, 2, 1], [0, 1, 2]),  # \ufffdcab
        ([3, 3, 4], [0, 1, 1]),  # \ufffd😀
        ([3, 6, 1], [0, 1, 2]),  # \ufffd\ufffdab
        ([5, 2], [0, 1]),  # \ufffdc
    ],
    ids=str,
)
def test_a_token_behind_a_broken_character_begins_behind_it(
    token_ids: list[int], begins: list[int]
):
    text = b"".join(Tokenizer.pieces[i] for i in token_ids).decode(errors="replace")
    entries = [TokenLogprob(token_id, -1.0) for token_id in token_ids]
    output = StepOutput("r", token_ids, text, entries, finish_reason="length")
    made = LogprobGate(Tokenizer()).pass_through(output)
    assert [entry.text_offset for entry in made] == begins
    echoed = StepOutput("r", prompt_logprobs=entries, finish_reason="length")
    made = LogprobGate(Tokenizer(), text).pass_through(echoed)
    assert [entry.text_offset for entry in made] == begins
