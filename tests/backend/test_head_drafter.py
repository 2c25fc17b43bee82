"""What is a draft head's own; that its guesses never show is told with all drafters in test_speculation.py."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from backend.engine.params import GenerationRequest, SamplingParams
from backend.engine.sampler import law
from backend.models.draft_head import DraftHead, save_draft_head
from backend.options import EngineOptions, WorkerSettings
from backend.worker import LoadFault, load_engine
from tests.backend import tiny_llama
from tests.backend.test_rejection import p_value
from tests.backend.toy_head import toy_head
from tests.backend.toy_model import VOCAB_SIZE, new_engine, request, run

pytestmark = pytest.mark.usefixtures("one_thread")


def head_of(hidden_size: int, vocab_size: int, draft_ids: list[int]) -> DraftHead:
    head = DraftHead(torch.tensor(draft_ids), vocab_size, hidden_size, 8)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(0))
    return head.requires_grad_(False)


def test_a_trained_head_saves_steps() -> None:
    engine, plain = new_engine(draft_head=toy_head()), new_engine()
    items = [request(str(i), [i + 1, 5, 9] * 2, max_tokens=40) for i in range(4)]
    for item in items:
        assert run(engine, item)[item.request_id].token_ids == (
            run(plain, item)[item.request_id].token_ids
        )
    assert engine.stats().num_steps < 0.95 * plain.stats().num_steps


def test_a_prefix_hit_leaves_the_head_what_it_needs() -> None:
    """Only the last prompt token is computed: its hidden state is all that is read."""
    ids = [3, 1, 4, 1, 5, 9, 2, 6, 5]

    def guesses(engine_warm: bool) -> tuple[list[int], int, int]:
        engine = new_engine(draft_head=toy_head())
        run(engine, request("warm", ids if engine_warm else [7, 7], max_tokens=3))
        out = run(engine, request("a", ids, max_tokens=30))["a"]
        assert out.num_cached_tokens == (8 if engine_warm else 0)
        return out.token_ids, out.num_draft_tokens, out.num_accepted_tokens

    assert guesses(True) == guesses(False)


def test_a_preempted_request_is_guessed_for_again() -> None:
    engine = new_engine(draft_head=toy_head(), num_blocks=14)
    items = [request(str(i), [i + 1, 5, 9] * 3, max_tokens=24) for i in range(4)]
    outputs = run(engine, *items)
    assert engine.stats().num_preemptions > 0
    assert all(out.num_draft_tokens > 0 for out in outputs.values())


def test_a_head_guesses_its_own_tokens_only() -> None:
    engine = new_engine(draft_head=head_of(16, VOCAB_SIZE, [11, 3]))
    engine.add(request("a", [1, 2, 3], max_tokens=20))
    seen: set[int] = set()
    propose = engine._speculator.propose  # pyright: ignore[reportOptionalMemberAccess]

    def watched(requests: list) -> None:
        propose(requests)
        seen.update(token for r in requests for token in r.drafts.token_ids)

    engine._speculator.propose = watched  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]
    while engine.has_work:
        engine.step()
    assert seen
    assert seen <= {3, 11}


def test_a_head_that_makes_no_numbers_guesses_nothing(caplog: pytest.LogCaptureFixture) -> None:
    head = head_of(16, VOCAB_SIZE, [11, 3])
    head.mix.fill_(float("nan"))
    item = request("a", [1, 2, 3], max_tokens=20)
    engine = new_engine(draft_head=head)
    assert run(engine, item)["a"].token_ids == run(new_engine(), item)["a"].token_ids
    assert engine.stats().num_draft_tokens == 0
    assert caplog.text == ""


def test_unseeded_draws_keep_the_law() -> None:
    """Chi-square of the second output token, which is guessed, against the model's own law behind the first."""
    engine, counts = new_engine(draft_head=toy_head(), max_num_seqs=4), np.zeros((64, VOCAB_SIZE))
    params = {"temperature": 1.0, "top_k": 4}
    items = [request(str(i), [1, 2, 3], max_tokens=3, **params) for i in range(600)]
    for out in run(engine, *items).values():
        counts[out.token_ids[0], out.token_ids[1]] += 1
    assert engine.stats().num_draft_tokens > 250
    first = int(counts.sum(1).argmax())
    scored = request("b", [1, 2, 3, first, 1], max_tokens=1, prompt_logprobs=20)
    behind_first = run(new_engine(), scored)["b"].prompt_logprobs[4].top
    logits = np.full(VOCAB_SIZE, -np.inf, np.float32)
    for token_id, logprob in behind_first:
        logits[token_id] = logprob
    assert p_value(counts[first], law(logits, SamplingParams(**params))) > 0.01


@pytest.mark.parametrize(
    ("head", "fault"),
    [
        (head_of(8, VOCAB_SIZE, [1]), "reads hidden states of 8 numbers and the model has 16"),
        (head_of(16, VOCAB_SIZE - 1, [1]), "knows 63 tokens and the model 64"),
    ],
)
def test_a_head_of_another_model_is_refused(head: DraftHead, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        new_engine(draft_head=head)


# The worker


def settings(folder: Path, speculative: str) -> WorkerSettings:
    options = EngineOptions(dtype="float32", num_blocks=64, speculative=speculative)
    return WorkerSettings("local/0", "", str(folder), "", options=options)


def test_the_worker_loads_a_head(tmp_path: Path) -> None:
    model = tiny_llama.write_folder(tmp_path / "tiny", tiny_llama.tensors())
    size = tiny_llama.CONFIG.hidden_size
    save_draft_head(head_of(size, tiny_llama.CONFIG.vocab_size, [5, 6, 7]), tmp_path)
    texts = []
    for speculative in ("off", f"head:{tmp_path}"):
        engine = load_engine(settings(model, speculative)).engine
        params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
        engine.add(GenerationRequest("a", [3, 40, 41, 200, 7, 99], params))
        outputs = []
        while engine.has_work:
            outputs += engine.step()
        texts.append([token for out in outputs for token in out.token_ids])
    assert texts[0] == texts[1]
    assert outputs[-1].num_draft_tokens > 0


def test_a_head_that_cannot_be_loaded_is_one_line(tmp_path: Path) -> None:
    model = tiny_llama.write_folder(tmp_path / "tiny", tiny_llama.tensors())
    with pytest.raises(LoadFault, match="no such file") as caught:
        load_engine(settings(model, f"head:{tmp_path}"))
    assert "\n" not in str(caught.value)
