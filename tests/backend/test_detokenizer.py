from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.engine.detokenizer import Detokenizer


def pieces(chunks: list[bytes], *stop: str) -> tuple[list[str], Detokenizer]:
    """What each chunk makes visible, the finish last. Like the engine, it pushes nothing after a match."""
    detokenizer = Detokenizer(stop)
    shown: list[str] = []
    for chunk in chunks:
        shown.append(detokenizer.push(chunk))
        if detokenizer.matched_stop is not None:
            return shown, detokenizer
    return [*shown, detokenizer.finish()], detokenizer


def text_of(chunks: list[bytes], *stop: str) -> tuple[str, str | None]:
    shown, detokenizer = pieces(chunks, *stop)
    return "".join(shown), detokenizer.matched_stop


def test_a_character_split_over_tokens_appears_once_it_is_whole():
    shown, _ = pieces([b"a\xf0\x9f", b"\x98", b"\x80b"])
    assert shown == ["a", "", "\U0001f600b", ""]


def test_a_byte_that_is_never_text_appears_at_once_as_a_replacement():
    shown, _ = pieces([b"\xff", b"a"])
    assert shown == ["\ufffd", "a", ""]


@pytest.mark.parametrize("lead", [b"\xc0", b"\xe0", b"\xf0\x9f", b"\xf5", b"\xe2\x82"])
def test_a_broken_lead_byte_does_not_swallow_the_letter_behind_it(lead: bytes):
    text, _ = text_of([lead, b"A"])
    assert text == "\ufffdA"


def test_real_replacement_characters_are_not_held_back():
    shown, _ = pieces(["\ufffd".encode()] * 3)
    assert shown == ["\ufffd"] * 3 + [""]


def test_a_character_cut_off_by_the_end_becomes_one_replacement():
    shown, _ = pieces([b"abc", b"\xf0\x9f\x98"])
    assert shown == ["abc", "", "\ufffd"]


def test_no_part_of_a_stop_string_over_several_tokens_is_shown():
    shown, detokenizer = pieces([b"ABC", b"DEF", b"G", b"HI", b"JKL"], "DEFGHIJ")
    assert shown == ["ABC", "", "", "", ""]
    assert detokenizer.matched_stop == "DEFGHIJ"


def test_the_text_before_a_stop_string_inside_a_token_is_shown():
    assert text_of([b"The", b" quick", b" brown", b" fox", b" jumps"], "own fox") == (
        "The quick br",
        "own fox",
    )


def test_only_a_suffix_that_may_become_a_stop_string_is_held():
    shown, _ = pieces([b"one <", b"b>two</", b"stop", b"s>"], "</stop>")
    assert shown == ["one ", "<b>two", "", "</stops>", ""]


def test_held_text_is_released_when_the_end_comes_first():
    assert text_of([b"ends in DEF"], "DEFG") == ("ends in DEF", None)


def test_a_stop_string_that_overlaps_its_own_beginning_is_found():
    assert text_of([b"aab", b"aaab"], "aaab") == ("aab", "aaab")


def test_the_stop_string_that_is_complete_first_wins():
    assert text_of([b"abcdefgh"], "fgh", "cd", "bcdef") == ("ab", "cd")


def test_of_two_stop_strings_that_end_together_the_longer_wins():
    assert text_of([b"abcd"], "cd", "bcd") == ("a", "bcd")


def test_a_stop_string_of_split_characters_is_found():
    assert text_of([b"x\xf0\x9f", b"\x98\x80y"], "\U0001f600") == ("x", "\U0001f600")


def test_a_stop_string_completed_by_the_flushed_tail_is_found():
    assert text_of([b"ab\xe2\x82"], "b\ufffd") == ("a", "b\ufffd")


def test_nothing_is_shown_after_a_match():
    detokenizer = Detokenizer(["stop"])
    assert detokenizer.push(b"a stop b") == "a "
    assert detokenizer.finish() == ""


def test_a_stop_string_that_comes_too_early_is_shown_and_later_ones_match():
    detokenizer = Detokenizer(["ab"])
    assert detokenizer.push(b"ab", match_stop=False) == "ab"
    assert detokenizer.push(b"cab") == "c"
    assert detokenizer.matched_stop == "ab"


@given(st.binary(max_size=40), st.lists(st.integers(0, 40), max_size=8))
def test_pieces_joined_are_the_text_of_all_bytes(data: bytes, cuts: list[int]):
    borders = [0, *sorted(cuts), len(data)]
    chunks = [data[a:b] for a, b in itertools.pairwise(borders)]
    assert text_of(chunks)[0] == data.decode("utf-8", "replace")


@given(
    st.text("ab", max_size=30),
    st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3),
    st.lists(st.integers(0, 30), max_size=8),
)
def test_however_the_text_is_cut_the_same_stop_string_wins(
    text: str, stop: list[str], cuts: list[int]
):
    borders = [0, *sorted(cuts), len(text)]
    chunks = [text[a:b].encode() for a, b in itertools.pairwise(borders)]
    ends = [(text.find(s) + len(s), -len(s), s) for s in stop if s in text]
    expected = (text, None) if not ends else (text[: min(ends)[0] + min(ends)[1]], min(ends)[2])
    assert text_of(chunks, *stop) == expected
