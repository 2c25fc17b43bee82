"""How much is guessed follows acceptance and load: an engine whose clock is a model's price list."""

from __future__ import annotations

import pytest
from torch import Tensor

from backend.engine.config import EngineConfig
from backend.engine.engine import LLMEngine
from backend.models.batch import Batch, KVCache
from tests.backend.toy_head import toy_head
from tests.backend.toy_model import ToyModel, ToyTokenizer, request, run

pytestmark = pytest.mark.usefixtures("one_thread")


class PricedModel(ToyModel):
    """A step takes one second, and `row_s` for each row."""

    def __init__(self, row_s: float) -> None:
        super().__init__()
        self.now_s = 0.0
        self._row_s = row_s

    def hidden_states(self, batch: Batch, kv: KVCache) -> Tensor:
        self.now_s += 1.0 + self._row_s * len(batch.token_ids)
        return super().hidden_states(batch, kv)


def priced(how: str, row_s: float, num_requests: int = 1) -> tuple[float, float]:
    """Seconds of the model's clock for some text, and guesses for each token of it."""
    model = PricedModel(row_s)
    engine = LLMEngine(
        model,
        ToyTokenizer(),
        EngineConfig(
            block_size=4, num_blocks=1024, speculative="ngram" if how == "ngram" else "off"
        ),
        draft_head=toy_head() if how == "head" else None,
        clock=lambda: model.now_s,
        entropy=iter(range(1, 10**6)).__next__,
    )
    items = [request(str(i), [i % 50 + 1, 5, 9] * 2, max_tokens=80) for i in range(num_requests)]
    run(engine, *items)
    stats = engine.stats()
    return model.now_s, stats.num_draft_tokens / stats.num_output_tokens


@pytest.mark.parametrize("how", ["ngram", "head"])
def test_where_rows_cost_little_guesses_save_time(how: str) -> None:
    assert priced(how, 0.01)[0] < 0.9 * priced("off", 0.01)[0]


@pytest.mark.parametrize("how", ["ngram", "head"])
def test_where_rows_cost_much_guessing_stops_before_it_loses(how: str) -> None:
    assert priced(how, 5.0)[0] < 1.05 * priced("off", 5.0)[0]


@pytest.mark.parametrize("how", ["ngram", "head"])
def test_the_dearer_a_row_the_less_is_guessed(how: str) -> None:
    rates = [priced(how, row_s)[1] for row_s in (0.01, 0.3, 5.0)]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] > 3 * rates[-1]


@pytest.mark.parametrize("how", ["ngram", "head"])
def test_the_fuller_the_batch_the_less_is_guessed(how: str) -> None:
    rates = [priced(how, 0.2, num_requests)[1] for num_requests in (1, 4, 16)]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] > 2 * rates[-1]
