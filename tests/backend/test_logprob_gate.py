from __future__ import annotations

import math

from backend.engine.params import StepOutput, TokenLogprob
from backend.logprobs import LogprobGate


class Tokenizer:
    pieces = ("<s>", "ab", "c")

    def token_bytes(self, token_id: int) -> bytes:
        return self.pieces[token_id].encode() if token_id else b""

    def token_text(self, token_id: int) -> str:
        return self.pieces[token_id]


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
