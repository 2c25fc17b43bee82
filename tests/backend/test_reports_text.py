"""Reports of users of other engines about stop strings and broken characters, each driven through ours."""

from __future__ import annotations

from typing import Any

import pytest

from backend.engine.params import StepOutput
from tests.backend.scripted_model import FIRST_PIECE, ScriptModel, ScriptTokenizer
from tests.backend.toy_model import ScriptModel as NextToken
from tests.backend.toy_model import ToyTokenizer, joined, new_engine, request

pytestmark = pytest.mark.usefixtures("one_thread")
Piece = dict[str, str]


def said(*pieces: str | bytes, **params: Any) -> tuple[list[str], StepOutput]:
    """What a model that says these pieces, then ends its turn, sends -> the deltas, and the whole output."""
    script = [{"hex": p.hex()} if isinstance(p, bytes) else {"t": p} for p in pieces]
    speculative = params.pop("speculative", "off")
    engine = new_engine(
        ScriptModel({"pieces": script}),
        ScriptTokenizer(script),  # pyright: ignore[reportArgumentType]
        speculative=speculative,
    )
    engine.add(request("a", b"hi", **{"max_tokens": 100, "ignore_eos": False, **params}))
    outputs: list[StepOutput] = []
    while engine.has_work:
        outputs += engine.step()
    return [out.text for out in outputs], joined(outputs)["a"]


def test_report_31_vllm_3574_no_beginning_of_a_stop_string_is_sent() -> None:
    deltas, whole = said("ABC", "DEF", "G", "HI", "JKLM", stop=("DEFGHIJ",))
    assert deltas == ["ABC", "", "", "", ""]
    assert (whole.text, whole.stop_reason, whole.num_output_tokens) == ("ABC", "DEFGHIJ", 5)


def test_report_32_swiftlm_126_a_stop_string_that_begins_inside_a_word_cuts_it() -> None:
    deltas, whole = said("The", " quick", " brown", " fox", " jumps", stop=("own fox",))
    assert whole.text == "The quick br"
    assert deltas == ["The", " quick", " br", ""]


@pytest.mark.parametrize("text", ["<b>x</b>", "a <tool> b", "plain words, no tags"])
def test_report_33_smg_2203_only_what_may_become_the_stop_string_is_held(text: str) -> None:
    deltas, whole = said(*text, stop=("<tool_call>",))
    assert whole.text == text
    shown = ""
    for index, delta in enumerate(deltas):
        shown += delta
        held = text[len(shown) : index + 1]
        assert "<tool_call>".startswith(held), "held, though it cannot become the stop string"


@pytest.mark.parametrize("speculative", ["off", "ngram"])
def test_report_34_vllm_55483_the_text_of_a_stop_token_never_shows(speculative: str) -> None:
    """Also when the tokens before and behind it arrive in the same step."""
    pieces = [b"", *(bytes([65 + i]) for i in range(9))]
    engine = new_engine(
        NextToken(lambda position, token: 1 + token % 9, len(pieces)),
        ToyTokenizer(pieces),
        speculative=speculative,
    )
    prompt = [1 + i % 9 for i in range(29)]
    engine.add(request("a", prompt, max_tokens=50, stop_token_ids=(8,), logprobs=0))
    outputs: list[StepOutput] = []
    while engine.has_work:
        outputs += engine.step()
    assert (len(outputs) < 6) is (speculative == "ngram")
    whole = joined(outputs)["a"]
    assert (whole.text, whole.token_ids) == ("CDEFG", [3, 4, 5, 6, 7, 8])
    assert [entry.token_id for entry in whole.logprobs] == [3, 4, 5, 6, 7]
    assert (whole.finish_reason, whole.stop_reason, whole.num_output_tokens) == ("stop", 8, 6)


FAMILY = "👩‍👩‍👧"  # seven code points with their joiners, 18 bytes


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("text", [f"Hi {FAMILY}!", "日本語です", "ñandú", "\U0001f600" * 4])
def test_report_35_tgi_333_characters_in_pieces_arrive_whole(text: str, size: int) -> None:
    data = text.encode()
    deltas, whole = said(*(data[i : i + size] for i in range(0, len(data), size)))
    assert "".join(deltas) == whole.text == text
    assert not any("\ufffd" in delta for delta in deltas)


@pytest.mark.parametrize("piece", ["\ufffd".encode(), b"\xff", b"\xef\xbf\xbd\xef\xbf"])
def test_report_36_sglang_34740_real_replacement_characters_flow(piece: bytes) -> None:
    deltas, whole = said(*[piece] * 50, "end")
    assert whole.text == (piece * 50).decode(errors="replace") + "end"
    assert all(deltas[:50]), "a step that shows nothing though there was something to show"


@pytest.mark.parametrize("tail", [b"\xf0", b"\xf0\x9f", b"\xf0\x9f\x98", b"\xe6\x97"])
def test_report_37_lattice_751_a_character_cut_by_the_end_is_the_same_streamed_and_whole(
    tail: bytes,
) -> None:
    deltas, whole = said("ab", tail)
    assert "".join(deltas) == whole.text == (b"ab" + tail).decode(errors="replace")
    assert whole.finish_reason == "stop"


@pytest.mark.parametrize("max_tokens", [3, 100])
def test_report_38_mini_sglang_a_tail_behind_the_last_space_is_not_lost(max_tokens: int) -> None:
    _, whole = said("one two", " abc", b"\xe2\x82", max_tokens=max_tokens)
    assert whole.text == "one two abc\ufffd"
    _, held = said("one two", " ab", stop=("abc",), max_tokens=max_tokens)
    assert held.text == "one two ab"


def test_a_script_begins_behind_its_prompt() -> None:
    """What the tests above rest on: the first piece is the first token drawn."""
    assert said("x", "y")[1].token_ids[:2] == [FIRST_PIECE, FIRST_PIECE + 1]
