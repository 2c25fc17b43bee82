from __future__ import annotations

from backend.answer import Answer
from backend.protocol import Accepted, Delta, Ready
from plugins.events import Request, Sampling, Usage


def test_guesses_of_all_choices_are_in_the_usage() -> None:
    request = Request("r", "chat", "m", sampling=Sampling(n=2))
    answer = Answer(request, "m", Ready("m", "f", 100, 10, 1))
    first = Delta(1, 0, "a", 1, 0, num_draft_tokens=4, num_accepted_tokens=1)
    last = [
        Delta(1, i, "b", 9, 0, finish_reason="stop", num_draft_tokens=8, num_accepted_tokens=5 + i)
        for i in range(2)
    ]
    events = answer.read([Accepted(1, 3), first, *last])
    assert events[-1] == Usage(3, 18, accepted_prediction_tokens=11, rejected_prediction_tokens=5)
