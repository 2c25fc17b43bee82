"""A worker process with a toy in place of the model: it repeats its prompt, byte by byte, until told to stop."""

from __future__ import annotations

import math
import sys
import time
from typing import Any

from backend.engine.detokenizer import Detokenizer
from backend.engine.params import (
    EngineStats,
    GenerationRequest,
    RequestClass,
    StepOutput,
    TokenLogprob,
    check_params,
)
from backend.options import WorkerSettings
from backend.worker import Loaded, LoadFault, exit_now, main

MAX_MODEL_LEN = 2_000_000
BOS = 256


class ToyTokenizer:
    """A token is a byte; 256 begins a text."""

    vocab_size = 257

    def encode(
        self, text: str, *, add_special: bool = False, parse_special: bool = True
    ) -> list[int]:
        return [BOS] * add_special + list(text.encode())

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b""

    def token_text(self, token_id: int) -> str:
        return "<s>" if token_id == BOS else self.token_bytes(token_id).decode(errors="replace")


class ToyTemplateError(Exception):
    pass


class ToyTemplate:
    text = tool_text = "{{ messages }}{{ tools }}"

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        if messages[0]["role"] == "tool":
            raise ToyTemplateError("conversations begin with a user")
        end = "" if continue_final_message else ">"
        return "|".join(f"{m['role']}:{m['content']}" for m in messages) + end


class Row:
    def __init__(self, request: GenerationRequest) -> None:
        self.request = request
        self.detokenizer = Detokenizer(request.params.stop)
        self.num_output = 0

    def next_output(self) -> StepOutput:
        request, params = self.request, self.request.params
        if params.max_tokens == 0:
            return self.first_output(StepOutput(request.request_id, finish_reason="length"))
        text = [token for token in request.prompt_ids if token != BOS]
        token = text[self.num_output % len(text)]
        self.num_output += 1
        output = StepOutput(
            request.request_id,
            [token],
            self.detokenizer.push(bytes([token])),
            num_prompt_tokens=len(request.prompt_ids),
            num_cached_tokens=len(request.prompt_ids) // 2,
            num_output_tokens=self.num_output,
            mean_logprob=-0.5 - (params.seed or 0) % 3,
        )
        if self.num_output == 1:
            self.first_output(output)
        if params.logprobs is not None:
            top = tuple((t, -1.0 - t) for t in range(params.logprobs))
            output.logprobs = [TokenLogprob(token, -0.5, top)]
        if self.detokenizer.matched_stop is not None:
            output.finish_reason, output.stop_reason = "stop", self.detokenizer.matched_stop
        elif self.num_output == params.max_tokens:
            output.text += self.detokenizer.finish()
            output.finish_reason = "length"
        return output

    def first_output(self, output: StepOutput) -> StepOutput:
        """Prompt logprobs, the token's id for a value, if they are asked for."""
        if self.request.params.prompt_logprobs is not None:
            output.prompt_logprobs = [TokenLogprob(t, -float(t)) for t in self.request.prompt_ids]
            output.prompt_logprobs[0] = TokenLogprob(self.request.prompt_ids[0], math.nan)
        return output


class ToyEngine:
    """One block a request. A prompt with the word "explode" ends the engine, "fail" ends its request."""

    vocab_size = 257
    max_model_len = MAX_MODEL_LEN
    num_blocks = 8

    def __init__(self) -> None:
        self.rows: dict[str, Row] = {}
        self.num_output = 0

    @property
    def has_work(self) -> bool:
        return bool(self.rows)

    def add(self, request: GenerationRequest) -> None:
        check_params(
            request.params,
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
            num_prompt_tokens=len(request.prompt_ids),
        )
        self.rows[request.request_id] = Row(request)

    def abort(self, request_id: str) -> None:
        self.rows.pop(request_id, None)

    def step(self) -> list[StepOutput]:
        time.sleep(0.002)
        outputs = [self._advance(row) for row in self.rows.values()]
        for output in outputs:
            if output.finish_reason is not None:
                del self.rows[output.request_id]
        self.num_output += len(outputs)
        return outputs

    def _advance(self, row: Row) -> StepOutput:
        prompt = bytes(token for token in row.request.prompt_ids if token != BOS)
        if b"explode" in prompt:
            raise RuntimeError("the engine is corrupt")
        if b"fail" in prompt:
            row_id = row.request.request_id
            return StepOutput(row_id, finish_reason="error", error="the model failed")
        return row.next_output()

    def stats(self) -> EngineStats:
        free = self.num_blocks - len(self.rows)
        classes = [row.request.klass for row in self.rows.values()]
        return EngineStats(
            len(self.rows),
            0,
            self.num_blocks,
            free,
            num_output_tokens=self.num_output,
            running_by_class=tuple(classes.count(klass) for klass in RequestClass),
        )


def load_toy(settings: WorkerSettings) -> Loaded:
    if settings.model_path == "damaged":
        raise LoadFault("damaged: not a model")
    tokenizer = ToyTokenizer()
    return Loaded(ToyEngine(), tokenizer, ToyTemplate(), ToyTemplateError, "toy", "toy-1")


if __name__ == "__main__":
    sys.stdin.fileno()  # the settings come there, as for the real worker
    exit_now(main(load_toy))
