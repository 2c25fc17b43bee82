"""Log-probabilities in step with the text: an entry leaves the worker when its token's text does, never past a stop."""

from __future__ import annotations

import codecs
from dataclasses import dataclass, field
from typing import Protocol

from backend.engine.params import StepOutput, TokenLogprob
from backend.protocol import Logprob, TopLogprob


class TokenText(Protocol):
    def token_bytes(self, token_id: int) -> bytes: ...

    def token_text(self, token_id: int) -> str: ...


@dataclass(slots=True)
class LogprobGate:
    """Of one choice. Offsets count characters of its text, echoed prompt included."""

    tokenizer: TokenText
    echo: str | None = None  # the prompt's text, which is shown before the first token's
    offset: int = 0  # where the next token begins
    num_shown: int = 0  # characters that have left
    _held: list[tuple[int, Logprob]] = field(default_factory=list["tuple[int, Logprob]"])
    _decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace")
    )

    def pass_through(self, output: StepOutput) -> list[Logprob]:
        """The entries that belong to the text shown so far, this step's and the echo included."""
        if self.echo is not None:
            self._echo_prompt(self.echo, output)
        for entry in output.logprobs:
            logprob = self._convert(entry, self._decoder)
            self.offset += len(self._decoder.decode(logprob.data))
            self._held.append((self.offset, logprob))
        self.num_shown += len(output.text)
        cut = output.finish_reason == "stop" and isinstance(output.stop_reason, str)
        if output.finish_reason is not None and not cut:
            return [logprob for _, logprob in self._held]
        ready = [logprob for end, logprob in self._held if end <= self.num_shown]
        del self._held[: len(ready)]
        return ready

    def _echo_prompt(self, text: str, output: StepOutput) -> None:
        """Hold an entry for each prompt token. A special token takes room only where the text spells it."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for entry in output.prompt_logprobs:
            logprob = self._convert(entry, decoder)
            spelt = not logprob.data and text.startswith(logprob.token, self.offset)
            self.offset += len(logprob.token if spelt else decoder.decode(logprob.data))
            self._held.append((0, logprob))
        self.offset = self.num_shown = len(text)
        self.echo = None

    def _convert(self, entry: TokenLogprob, decoder: codecs.IncrementalDecoder) -> Logprob:
        text, data = self._spell(entry.token_id)
        top = [TopLogprob(*self._spell(token_id), logprob) for token_id, logprob in entry.top]
        return Logprob(text, data, entry.logprob, top, self.offset + _cuts_off(decoder, data))

    def _spell(self, token_id: int) -> tuple[str, bytes]:
        """Special tokens have no bytes in the text, so their name stands for them."""
        text = self.tokenizer.token_text(token_id)
        return text, self.tokenizer.token_bytes(token_id)


def _cuts_off(decoder: codecs.IncrementalDecoder, data: bytes) -> bool:
    """Whether these bytes do not go on with the character that has begun: one U+FFFD then comes before them."""
    begun = decoder.getstate()[0]
    try:
        codecs.utf_8_decode(begun + data[:1], "strict", False)
    except UnicodeDecodeError:
        return bool(begun)
    return False
