"""The engine: add requests, call `step` until `has_work` is False. A library: one thread, no I/O, no globals."""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable

import numpy as np

from backend.engine.block_pool import BlockPool, root_digest
from backend.engine.config import EngineConfig, kv_cache_blocks
from backend.engine.detokenizer import Detokenizer, EngineTokenizer
from backend.engine.draft_model import DraftModel
from backend.engine.grammar import MaskThread
from backend.engine.logit_rules import LogitRules
from backend.engine.noise import MASK64
from backend.engine.params import (
    EngineStats,
    GenerationRequest,
    InvalidGeneration,
    RequestClass,
    StepOutput,
    TokenLogprob,
    check_embedding,
    check_params,
    check_token_ids,
)
from backend.engine.pooling import Pooler
from backend.engine.progress import append_token, new_output, score_prompt
from backend.engine.request import EngineRequest, Rows
from backend.engine.runner import ModelRunner, StepResult
from backend.engine.sampler import Guess, Sampler
from backend.engine.scheduler import Scheduled, Scheduler
from backend.engine.speculate import NgramDrafter, Speculator
from backend.models.batch import Model, cdiv

__all__ = ["EngineConfig", "EngineTokenizer", "InvalidGeneration", "LLMEngine", "check_params"]

NOT_INVARIANT = (
    "deterministic: the last bits of this model's numbers depend on how many rows a step has; it takes the native tier "
    '(dtype and quantization "auto", and a C++ compiler), or false'
)
NOT_NUMBERS = "the model's logits are not numbers"
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
        draft_model: Model | None = None,
        clock: Callable[[], float] = time.monotonic,
        entropy: Callable[[], int] = lambda: secrets.randbits(64),
    ) -> None:
        """Allocates the KV cache. ValueError when the configured context does not fit in it, when models do not match,
        or when `deterministic` is asked of a model that cannot be.

        `draft_model` guesses tokens for `model`; its vocabulary must be the same.
        """
        if config.deterministic and not model.is_batch_invariant:
            raise ValueError(NOT_INVARIANT)
        models = [model] if draft_model is None else [model, draft_model]
        bytes_per_block = sum(m.kv_bytes_per_block(config.block_size) for m in models)
        num_blocks = kv_cache_blocks(config, bytes_per_block)
        self.max_model_len = _context_len(config, model, num_blocks)
        self.vocab_size = min(model.vocab_size, tokenizer.vocab_size)  # models pad theirs
        self.hidden_size = model.hidden_size
        self._model = model
        self._tokenizer = tokenizer
        self._config = config
        self._clock = clock
        self._entropy = entropy
        self._pool = BlockPool(num_blocks)
        # A draft model keeps its own keys in the same blocks, and looks further back.
        window = model.window if draft_model is None else None
        self._scheduler = Scheduler(config, self._pool, window)
        row_len = cdiv(self.max_model_len, config.block_size)
        block_rows = np.zeros((config.max_num_seqs, row_len), np.int32)
        self._runner = ModelRunner(model, num_blocks, config.block_size, block_rows)
        self._sampler = Sampler(self.vocab_size)
        self._speculator = self._new_speculator(draft_model, num_blocks, block_rows)
        self._masks = MaskThread()
        self._requests: dict[str, EngineRequest] = {}
        self._num_arrivals = 0
        self._step_end_s = 0.0
        self._totals = dict.fromkeys(("steps", "cached", "prompt", "output"), 0)

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def add(self, request: GenerationRequest) -> None:
        """Queue a request. InvalidGeneration when it could never run; nothing is kept of it then."""
        params, num_prompt_tokens = request.params, len(request.prompt_ids)
        self._check(request)
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
            max_output_tokens=self._max_output_tokens(request),
            seed=seed & MASK64,
            root=root_digest(self._model.fingerprint, request.cache_salt, self._config.block_size),
            detokenizer=Detokenizer(params.stop),
            rules=LogitRules(params, request.prompt_ids, eos_ids)
            if LogitRules.needed(params)
            else None,
            grammar=request.grammar,
            markers=request.markers,
            objective=request.objective,
            pooler=self._new_pooler(request),
        )
        if params.prompt_logprobs is not None:
            engine_request.prompt_logprobs.append(TokenLogprob(request.prompt_ids[0], math.nan))
        self._num_arrivals += 1
        self._requests[request.request_id] = engine_request
        self._scheduler.add(engine_request)

    def _check(self, request: GenerationRequest) -> None:
        if request.request_id in self._requests:
            message = f"request_id {request.request_id!r} is already being generated"
            raise InvalidGeneration(message, "request_id")
        if request.embedding is not None:
            check_embedding(
                request.embedding,
                hidden_size=self.hidden_size,
                max_model_len=self.max_model_len,
                num_prompt_tokens=len(request.prompt_ids),
            )
        else:
            check_params(
                request.params,
                vocab_size=self.vocab_size,
                max_model_len=self.max_model_len,
                num_prompt_tokens=len(request.prompt_ids),
            )
        param = "prompt" if request.embedding is None else "input"
        check_token_ids(request.prompt_ids, param, self.vocab_size)

    def _max_output_tokens(self, request: GenerationRequest) -> int:
        if request.embedding is not None:
            return 0
        room, asked = self.max_model_len - len(request.prompt_ids), request.params.max_tokens
        return room if asked is None else asked

    def _new_pooler(self, request: GenerationRequest) -> Pooler | None:
        if request.embedding is None:
            return None
        dimensions = request.embedding.dimensions or self.hidden_size
        return Pooler(self._config.pooling, len(request.prompt_ids), dimensions)

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
        scheduled = self._schedule()
        if not scheduled:
            return []
        self._totals["steps"] += 1
        rows = [request.next_rows(num_tokens) for request, num_tokens in scheduled]
        try:
            masks = self._masks.begin([item.request.grammar for item in rows if item.num_draws])
            result = self._run(rows)
            masks.result()
        except Exception as exc:
            logger.exception("a step of %d requests failed", len(scheduled))
            return [self._fail(request, f"the model failed: {exc}") for request, _ in scheduled]
        outputs: list[StepOutput] = []
        for item, logits, hidden in result.by_request(rows):
            if item.request.pooler is None:
                output = self._advance(item, logits[:, : self.vocab_size])
            else:
                output = self._embed(item, item.request.pooler, hidden)
            if output is not None:
                outputs.append(output)
        return outputs

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
            num_draft_tokens=self._speculator.num_proposed if self._speculator else 0,
            num_accepted_tokens=self._speculator.num_accepted if self._speculator else 0,
            num_evictions=self._pool.num_evictions,
            running_by_class=_count_classes(self._scheduler.running),
            waiting_by_class=_count_classes(waiting),
            oldest_waiting_s=max((now - request.arrival_s for request in waiting), default=0.0),
        )

    def _new_speculator(
        self, draft_model: Model | None, num_blocks: int, block_rows: np.ndarray
    ) -> Speculator | None:
        if draft_model is None:
            if self._config.speculative == "off":
                return None
            return Speculator(NgramDrafter(), self._clock, self.max_model_len)
        if draft_model.vocab_size < self.vocab_size:
            raise ValueError(
                f"the draft model knows {draft_model.vocab_size} tokens and the model {self.vocab_size}: "
                "both must have the same vocabulary"
            )
        drafter = DraftModel(draft_model, self._config, self._sampler, num_blocks, block_rows)
        longest = min(self.max_model_len, draft_model.max_position)
        return Speculator(drafter, self._clock, longest)

    def _schedule(self) -> list[Scheduled]:
        if self._speculator is None:
            return self._scheduler.schedule(self._clock())
        self._speculator.plan(self._scheduler.running)
        scheduled = self._scheduler.schedule(self._clock())
        self._speculator.propose([r for r, _ in scheduled if r.drafts.num_granted > 0])
        return scheduled

    def _run(self, rows: list[Rows]) -> StepResult:
        started_s = self._clock()
        result = self._runner.run(rows)
        self._step_end_s = self._clock()
        seconds = self._step_end_s - started_s
        self._scheduler.record_step(sum(len(item.token_ids) for item in rows), seconds)
        if self._speculator is not None:
            self._speculator.record_step(rows, seconds)
        return result

    def _advance(self, rows: Rows, logits: np.ndarray) -> StepOutput | None:
        """Take over what a step computed of one request -> None while its tokens are not all computed."""
        request = rows.request
        num_scored = rows.num_logits - rows.num_draws
        if not score_prompt(request, logits[:num_scored]):
            return self._fail(request, NOT_NUMBERS)
        output = None
        if num_scored < rows.num_logits:
            output = self._generate(request, logits[num_scored:])
            if output is None:
                return self._fail(request, _why_no_draw(request))
        # One token is always left to compute: the next step starts from its logits.
        end = rows.start + len(rows.token_ids)
        request.num_computed_tokens = min(end, request.num_tokens - 1)
        self._scheduler.publish(request)
        if output is not None and output.finish_reason is not None:
            self._finish(request)
        return output

    def _generate(self, request: EngineRequest, logits: np.ndarray) -> StepOutput | None:
        """Draw the next token, and one more behind each guess that was right -> None: no token can be drawn."""
        output, is_first = new_output(request), request.num_output_tokens == 0
        if is_first:
            request.first_token_s = self._step_end_s
            output.prompt_logprobs = request.prompt_logprobs
            self._totals["prompt"] += request.num_prompt_tokens
            self._totals["cached"] += request.num_cached_tokens
        if request.max_output_tokens == 0:
            output.finish_reason = "length"
            return output
        drafts = request.drafts
        for index, raw in enumerate(logits):
            guess = (
                Guess(drafts.token_ids[index], drafts.laws[index])
                if index < len(drafts.laws)
                else None
            )
            draw = self._sampler.sample(raw, request, guess)
            if draw is None:
                return None
            append_token(request, draw, self._tokenizer, output)
            if output.finish_reason is not None or drafts.token_ids[index : index + 1] != [
                draw.token_id
            ]:
                break
        self._totals["output"] += len(output.token_ids)
        if self._speculator is not None and drafts.token_ids:
            self._speculator.record(request, output.token_ids)
            output.num_draft_tokens = drafts.num_proposed
            output.num_accepted_tokens = drafts.num_accepted
        return output

    def _embed(self, rows: Rows, pooler: Pooler, hidden: np.ndarray) -> StepOutput | None:
        """Take over a chunk of a prompt that becomes a vector -> None until its last. Blocks are never published."""
        request = rows.request
        pooler.add(hidden)
        request.num_computed_tokens = rows.start + len(rows.token_ids)
        if request.num_wanted_tokens:
            return None
        vector = pooler.vector()
        if vector is None:
            return self._fail(request, "the model's hidden states are not numbers")
        self._totals["prompt"] += request.num_prompt_tokens
        output = new_output(request)
        output.finish_reason, output.embedding = "stop", vector.astype("<f4").tobytes()
        self._finish(request)
        return output

    def _fail(self, request: EngineRequest, error: str) -> StepOutput:
        """End a request whose blocks cannot be trusted: nobody may find or inherit what is in them."""
        owned_alone = self._pool.owned_once(request.block_table)
        self._pool.unpublish(request.block_table)
        self._finish(request)
        self._runner.scrub(owned_alone)
        output = new_output(request)
        output.finish_reason, output.error = "error", error
        return output

    def _finish(self, request: EngineRequest) -> None:
        if self._speculator is not None:
            self._speculator.forget(request)
        del self._requests[request.request_id]
        self._scheduler.finish(request)
        if not self._requests:
            self._pool.check_integrity(())


def _count_classes(requests: Iterable[EngineRequest]) -> tuple[int, ...]:
    counts = Counter(request.klass for request in requests)
    return tuple(counts[klass] for klass in RequestClass)


def _why_no_draw(request: EngineRequest) -> str:
    if request.grammar is not None and request.grammar.error:
        return f"the grammar cannot go on: {request.grammar.error}"
    return NOT_NUMBERS


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
