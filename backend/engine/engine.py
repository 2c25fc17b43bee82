"""The engine: add requests, call `step` until `has_work` is False. A library: one thread, no I/O, no globals."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Sequence

from backend.engine.block_pool import BlockPool, root_digest
from backend.engine.config import EngineConfig, kv_cache_blocks
from backend.engine.detokenizer import Detokenizer, EngineTokenizer
from backend.engine.grammar import MaskThread
from backend.engine.logit_rules import LogitRules
from backend.engine.noise import MASK64
from backend.engine.params import (
    EngineStats,
    FinishReason,
    GenerationRequest,
    InvalidGeneration,
    StepOutput,
    check_params,
    check_token_ids,
)
from backend.engine.request import EngineRequest
from backend.engine.runner import ModelRunner
from backend.engine.sampler import Draw, Sampler
from backend.engine.scheduler import Scheduled, Scheduler
from backend.models.batch import Model

__all__ = ["EngineConfig", "EngineTokenizer", "InvalidGeneration", "LLMEngine", "check_params"]

logger = logging.getLogger(__name__)


class LLMEngine:
    """Continuous batching over a paged KV cache. Not thread-safe: call it from one thread.

    `clock` gives seconds and only measures waiting; `entropy` gives 64 random bits to each request without a seed.
    """

    def __init__(
        self,
        model: Model,
        tokenizer: EngineTokenizer,
        config: EngineConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
        entropy: Callable[[], int] = lambda: secrets.randbits(64),
    ) -> None:
        """Allocates the KV cache. ValueError when the configured context does not fit in it."""
        num_blocks = kv_cache_blocks(config, model.kv_bytes_per_block(config.block_size))
        self.max_model_len = _context_len(config, model, num_blocks)
        self.vocab_size = min(model.vocab_size, tokenizer.vocab_size)  # models pad theirs
        self._model = model
        self._tokenizer = tokenizer
        self._config = config
        self._clock = clock
        self._entropy = entropy
        self._pool = BlockPool(num_blocks)
        self._scheduler = Scheduler(config, self._pool)
        self._runner = ModelRunner(
            model, num_blocks, config.block_size, config.max_num_seqs, self.max_model_len
        )
        self._sampler = Sampler(self.vocab_size)
        self._masks = MaskThread()
        self._requests: dict[str, EngineRequest] = {}
        self._num_arrivals = 0
        self._totals = dict.fromkeys(("steps", "cached", "prompt", "output"), 0)

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def add(self, request: GenerationRequest) -> None:
        """Queue a request. InvalidGeneration when it could never run; nothing is kept of it then."""
        params, num_prompt_tokens = request.params, len(request.prompt_ids)
        if request.request_id in self._requests:
            message = f"request_id {request.request_id!r} is already being generated"
            raise InvalidGeneration(message, "request_id")
        check_params(
            params,
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
            num_prompt_tokens=num_prompt_tokens,
        )
        check_token_ids(request.prompt_ids, "prompt", self.vocab_size)
        seed = self._entropy() if params.seed is None else params.seed
        eos_ids = self._tokenizer.eos_ids
        engine_request = EngineRequest(
            request_id=request.request_id,
            params=params,
            klass=request.klass,
            arrival=self._num_arrivals,
            arrival_s=self._clock(),
            token_ids=list(request.prompt_ids),
            num_prompt_tokens=num_prompt_tokens,
            max_output_tokens=params.max_tokens or self.max_model_len - num_prompt_tokens,
            seed=seed & MASK64,
            root=root_digest(self._model.fingerprint, request.cache_salt, self._config.block_size),
            detokenizer=Detokenizer(params.stop),
            rules=LogitRules(params, request.prompt_ids, eos_ids)
            if LogitRules.needed(params)
            else None,
            grammar=request.grammar,
            markers=request.markers,
        )
        self._num_arrivals += 1
        self._requests[request.request_id] = engine_request
        self._scheduler.add(engine_request)

    def abort(self, request_id: str) -> None:
        """Forget a request and free its blocks; nothing more comes out for it. Unknown ids are ignored."""
        request = self._requests.get(request_id)
        if request is not None:
            self._finish(request)

    def step(self) -> list[StepOutput]:
        """Compute one batch -> what it added to each request that got a token. [] when idle.

        A fault in the model ends the requests of this step with finish_reason "error"; the engine goes on.
        EngineCorrupt when the block accounting no longer adds up: discard the engine then.
        """
        scheduled = self._scheduler.schedule()
        if not scheduled:
            return []
        self._totals["steps"] += 1
        try:
            masks = self._masks.begin([request.grammar for request, _ in scheduled])
            sampled, logits = self._runner.run(scheduled)
            masks.result()
            draws = self._sampler.sample(logits[:, : self.vocab_size], sampled)
        except Exception as exc:
            logger.exception("a step of %d requests failed", len(scheduled))
            return [self._fail(request, f"the model failed: {exc}") for request, _ in scheduled]
        self._record_computed(scheduled, sampled, draws)
        return [
            self._fail(request, _why_no_draw(request))
            if draw is None
            else self._advance(request, draw)
            for request, draw in zip(sampled, draws, strict=True)
        ]

    def stats(self) -> EngineStats:
        now, waiting = self._clock(), self._scheduler.waiting
        return EngineStats(
            num_running=len(self._scheduler.running),
            num_waiting=len(waiting),
            num_blocks=self._pool.num_blocks,
            num_free_blocks=self._pool.num_free,
            num_preemptions=self._scheduler.num_preemptions,
            num_cached_tokens=self._totals["cached"],
            num_prompt_tokens=self._totals["prompt"],
            num_output_tokens=self._totals["output"],
            num_steps=self._totals["steps"],
            oldest_waiting_s=max((now - request.arrival_s for request in waiting), default=0.0),
        )

    def _record_computed(
        self,
        scheduled: Sequence[Scheduled],
        sampled: Sequence[EngineRequest],
        draws: Sequence[Draw | None],
    ) -> None:
        broken = {id(request) for request, draw in zip(sampled, draws, strict=True) if draw is None}
        for request, num_tokens in scheduled:
            request.num_computed_tokens += num_tokens
            if id(request) not in broken:
                self._scheduler.publish(request)

    def _advance(self, request: EngineRequest, draw: Draw) -> StepOutput:
        """Append the drawn token, and end the request if it is the last one."""
        params, detokenizer, token_id = request.params, request.detokenizer, draw.token_id
        request.append(token_id)
        may_stop = request.num_output_tokens >= params.min_tokens
        finish_reason: FinishReason | None = None
        stop_reason: str | int | None = None
        shown = not self._ends_turn(token_id, request)
        if not shown:
            text = detokenizer.finish(match_stop=may_stop)
            finish_reason = "stop"
            stop_reason = token_id if token_id in params.stop_token_ids else None
        else:
            text = detokenizer.push(self._shown_bytes(token_id, request), match_stop=may_stop)
            finish_reason = _end_of_output(request)
            if finish_reason is not None:
                text += detokenizer.finish(match_stop=may_stop)
        if detokenizer.matched_stop is not None:
            finish_reason, stop_reason = "stop", detokenizer.matched_stop
        self._count(request)
        if finish_reason is not None:
            self._finish(request)
        return StepOutput(
            request_id=request.request_id,
            token_ids=[token_id],
            text=text,
            logprobs=[draw.logprob] if draw.logprob is not None and shown else [],
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            num_prompt_tokens=request.num_prompt_tokens,
            num_cached_tokens=request.num_cached_tokens,
            num_output_tokens=request.num_output_tokens,
        )

    def _shown_bytes(self, token_id: int, request: EngineRequest) -> bytes:
        return request.markers.get(token_id) or self._tokenizer.token_bytes(token_id)

    def _ends_turn(self, token_id: int, request: EngineRequest) -> bool:
        if token_id in request.params.stop_token_ids:
            return True
        return token_id in self._tokenizer.eos_ids and not request.params.ignore_eos

    def _count(self, request: EngineRequest) -> None:
        self._totals["output"] += 1
        if request.num_output_tokens == 1:
            self._totals["prompt"] += request.num_prompt_tokens
            self._totals["cached"] += request.num_cached_tokens

    def _fail(self, request: EngineRequest, error: str) -> StepOutput:
        """End a request whose blocks cannot be trusted: nobody may find or inherit what is in them."""
        owned_alone = [b for b in request.block_table if self._pool.ref_counts[b] == 1]
        self._pool.unpublish(request.block_table)
        self._finish(request)
        self._runner.scrub(owned_alone)
        return StepOutput(
            request_id=request.request_id,
            finish_reason="error",
            error=error,
            num_prompt_tokens=request.num_prompt_tokens,
            num_cached_tokens=request.num_cached_tokens,
            num_output_tokens=request.num_output_tokens,
        )

    def _finish(self, request: EngineRequest) -> None:
        del self._requests[request.request_id]
        self._scheduler.finish(request)
        if not self._requests:
            self._pool.check_integrity(())


def _end_of_output(request: EngineRequest) -> FinishReason | None:
    """Whether the request is through without an end-of-turn token. A whole text at the limit is whole."""
    if request.grammar is not None and request.grammar.is_finished:
        return "stop"
    return "length" if request.num_output_tokens == request.max_output_tokens else None


def _why_no_draw(request: EngineRequest) -> str:
    if request.grammar is not None and request.grammar.error:
        return f"the grammar cannot go on: {request.grammar.error}"
    return "the model's logits are not numbers"


def _context_len(config: EngineConfig, model: Model, num_blocks: int) -> int:
    pool_len = num_blocks * config.block_size
    if config.max_model_len is None:
        return min(model.max_position, pool_len)
    if config.max_model_len > model.max_position:
        raise ValueError(
            f"max_model_len is {config.max_model_len}, the model was made for {model.max_position}"
        )
    if config.max_model_len > pool_len:
        raise ValueError(
            f"max_model_len is {config.max_model_len}, and the KV cache holds {pool_len} tokens: "
            "raise kv_cache_gb or lower max_model_len"
        )
    return config.max_model_len
