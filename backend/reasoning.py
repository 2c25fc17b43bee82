"""Reasoning blocks, `<think>...</think>`, split from the answer as its text arrives."""

from __future__ import annotations

OPENING, CLOSING = "<think>", "</think>"


def opens_block(prompt: str) -> bool:
    """Whether a prompt ends inside a block, so that the model begins with its thoughts."""
    return prompt.rstrip().endswith(OPENING)


class ReasoningSplitter:
    """Of one choice. A block can only be the first thing in an answer; space around it belongs to neither side.

    `inside`: the prompt has opened the block.
    """

    def __init__(self, *, inside: bool = False) -> None:
        self.inside = inside
        self._at_start = True  # of the block, or of the answer
        self._may_open = True
        self._rest = ""

    def feed(self, text: str) -> tuple[str, str]:
        """What is safe to show now: (reasoning, answer)."""
        if not self.inside and not self._at_start:
            return "", text
        self._rest += text
        if self._at_start and not self._read_start():
            return "", ""
        if self.inside:
            return self._read_block()
        rest, self._rest = self._rest, ""
        return "", rest

    def finish(self) -> tuple[str, str]:
        """The rest, once no more text comes; a block that never ended is reasoning."""
        rest, self._rest = self._rest, ""
        return (rest, "") if self.inside else ("", rest)

    def _read_start(self) -> bool:
        """False: too little text to know how it begins."""
        text = self._rest.lstrip()
        if not text or (self._may_open and text != OPENING and OPENING.startswith(text)):
            return False
        if self._may_open and text.startswith(OPENING):
            self.inside, self._may_open, self._rest = True, False, text[len(OPENING) :]
            return self._read_start()
        self._at_start = False
        if self.inside or not self._may_open:
            self._rest = text
        return True

    def _read_block(self) -> tuple[str, str]:
        reasoning, found, answer = self._rest.partition(CLOSING)
        if found:
            self.inside, self._may_open, self._at_start = False, False, True
            self._rest = ""
            return reasoning.rstrip(), self.feed(answer)[1]
        held = _held(self._rest)
        shown = self._rest[: len(self._rest) - len(held)]
        self._rest = held
        return shown, ""


def _held(text: str) -> str:
    """The end of `text` that may belong to the closing tag or to the space before it."""
    for length in range(min(len(CLOSING) - 1, len(text)), 0, -1):
        if text.endswith(CLOSING[:length]):
            return text[len(text[:-length].rstrip()) :]
    return text[len(text.rstrip()) :]
