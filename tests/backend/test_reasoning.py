from __future__ import annotations

import pytest

from backend.reasoning import ReasoningSplitter, opens_block


@pytest.mark.parametrize(
    ("inside", "text", "expected"),
    [
        (False, "<think>\nHm, 2 < 3.\n</think>\n\nYes.\n", ("Hm, 2 < 3.", "Yes.\n")),
        (True, "\nHm.\n</think>\n\nYes.", ("Hm.", "Yes.")),
        (True, "<think>Hm.</think>Yes.", ("Hm.", "Yes.")),
        (True, "Hm </thin", ("Hm </thin", "")),
        (True, "Hm\n\nthen </ then", ("Hm\n\nthen </ then", "")),
        (False, "Yes <think>no</think>", ("", "Yes <think>no</think>")),
        (False, " Yes", ("", " Yes")),
        (False, "<thin", ("", "<thin")),
        (False, "<think></think>Yes", ("", "Yes")),
        (True, "a</think><think>b</think>", ("a", "<think>b</think>")),
        (False, "", ("", "")),
        (True, "", ("", "")),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 5, 1000])
def test_a_block_is_split_however_the_text_is_cut(
    inside: bool, text: str, expected: tuple[str, str], size: int
) -> None:
    splitter = ReasoningSplitter(inside=inside)
    pairs = [splitter.feed(text[i : i + size]) for i in range(0, len(text), size)]
    pairs.append(splitter.finish())
    assert ("".join(a for a, _ in pairs), "".join(b for _, b in pairs)) == expected


def test_reasoning_streams() -> None:
    splitter = ReasoningSplitter(inside=True)
    assert splitter.feed("One thing") == ("One thing", "")
    assert splitter.inside
    assert splitter.feed("</think>") == ("", "")
    assert not splitter.inside


@pytest.mark.parametrize(
    ("prompt", "opens"),
    [("...<think>\n", True), ("<think>\n\n</think>\n\n", False), ("plain", False)],
)
def test_a_prompt_that_ends_with_the_tag_opens_a_block(prompt: str, opens: bool) -> None:
    assert opens_block(prompt) is opens
