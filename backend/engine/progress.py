"""What a drawn token adds to its request: text that is safe to show, log-probabilities, perhaps the end."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from backend.cpu.native_draw import native_draw
from backend.engine.detokenizer import EngineTokenizer
from backend.engine.params import FinishReason, StepOutput, TokenLogprob
from backend.engine.request import EngineRequest
from backend.engine.sampler import Draw, token_logprob


def new_output(request: EngineRequest) -> StepOutput:
    """An output with the request's counts as they are now."""
    num_output = request.num_output_tokens
    return StepOutput(
        request_id=request.request_id,
        num_prompt_tokens=request.num_prompt_tokens,
        num_cached_tokens=request.num_cached_tokens,
        num_output_tokens=num_output,
        num_draft_tokens=request.drafts.num_proposed,
        num_accepted_tokens=request.drafts.num_accepted,
        mean_logprob=request.sum_logprobs / num_output if num_output else 0.0,
    )


def score_prompt(request: EngineRequest, logits: Iterable[np.ndarray]) -> bool:
    """Record the next prompt tokens' logprobs, one for each row of `logits` -> False: they are not numbers."""
    num_top = request.params.prompt_logprobs or 0
    for raw in logits:
        if not np.isfinite(raw.max()):
            return False
        token_id = request.token_ids[len(request.prompt_logprobs)]
        request.prompt_logprobs.append(token_logprob(raw, token_id, num_top, native_draw()))
    return True


def append_token(
    request: EngineRequest, draw: Draw, tokenizer: EngineTokenizer, output: StepOutput
) -> None:
    """Append the drawn token to the request and to what this step puts out; `finish_reason` if it is the last one."""
    params, detokenizer, token_id = request.params, request.detokenizer, draw.token_id
    request.append(token_id)
    output.token_ids.append(token_id)
    may_stop = request.num_output_tokens >= params.min_tokens
    shown = not _ends_turn(request, token_id, tokenizer)
    if not shown:
        output.text += detokenizer.finish(match_stop=may_stop)
        output.finish_reason = "stop"
        output.stop_reason = token_id if token_id in params.stop_token_ids else None
    else:
        shown_bytes = request.markers.get(token_id) or tokenizer.token_bytes(token_id)
        output.text += detokenizer.push(shown_bytes, match_stop=may_stop)
        output.finish_reason = _end_of_output(request)
        if output.finish_reason is not None:
            output.text += detokenizer.finish(match_stop=may_stop)
    if detokenizer.matched_stop is not None:
        output.finish_reason, output.stop_reason = "stop", detokenizer.matched_stop
    _count(request, draw.logprob, output, shown)


def _end_of_output(request: EngineRequest) -> FinishReason | None:
    """Whether the request is through without an end-of-turn token. A whole text at the limit is whole."""
    if request.grammar is not None and request.grammar.is_finished:
        return "stop"
    return "length" if request.num_output_tokens == request.max_output_tokens else None


def _ends_turn(request: EngineRequest, token_id: int, tokenizer: EngineTokenizer) -> bool:
    if token_id in request.params.stop_token_ids:
        return True
    return token_id in tokenizer.eos_ids and not request.params.ignore_eos


def _count(
    request: EngineRequest, logprob: TokenLogprob | None, output: StepOutput, shown: bool
) -> None:
    output.num_output_tokens = request.num_output_tokens
    if logprob is not None:
        request.sum_logprobs += logprob.logprob
        output.mean_logprob = request.sum_logprobs / request.num_output_tokens
        if shown:
            output.logprobs.append(logprob)
