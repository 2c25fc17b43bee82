from __future__ import annotations

from backend.best_of import BestOf
from backend.protocol import Delta, Logprob


def ended(index: int, text: str, num_output: int, num_cached: int = 0) -> Delta:
    entry = Logprob(text, text.encode(), -1.0, [], 0)
    return Delta(7, index, text, num_output, num_cached, [entry], "stop")


def test_nothing_leaves_before_the_last_candidate_has_ended():
    ranking = BestOf(2, 1, 0, show_logprobs=False)
    assert ranking.pass_through(Delta(7, 0, "a", 1, 0), -1.0) == []
    assert ranking.pass_through(ended(0, "b", 2), -1.0) == []
    assert ranking.pass_through(ended(1, "c", 1), -2.0) != []


def test_the_likeliest_come_whole_and_best_first():
    ranking = BestOf(3, 2, 0, show_logprobs=False)
    ranking.pass_through(Delta(7, 2, "be", 1, 0), -9.0)
    for index, mean in ((0, -3.0), (1, -5.0)):
        ranking.pass_through(ended(index, f"text {index}", 2), mean)
    shown = ranking.pass_through(ended(2, "st", 2), -1.0)
    assert [(delta.index, delta.text) for delta in shown] == [(0, "best"), (1, "text 0")]
    assert [delta.finish_reason for delta in shown] == ["stop", "stop"]


def test_candidates_of_a_later_prompt_become_its_choices():
    ranking = BestOf(2, 1, 3, show_logprobs=False)
    ranking.pass_through(ended(6, "a", 1), -2.0)
    (shown,) = ranking.pass_through(ended(7, "b", 1), -1.0)
    assert (shown.index, shown.text) == (3, "b")


def test_all_candidates_are_counted_and_the_cached_prompt_once():
    ranking = BestOf(3, 2, 0, show_logprobs=False)
    for index, cached in ((0, 16), (1, 32)):
        ranking.pass_through(ended(index, "x", 10, cached), -2.0 - index)
    shown = ranking.pass_through(ended(2, "y", 7, 32), -1.0)
    assert sum(delta.num_output_tokens for delta in shown) == 27
    assert shown[0].num_cached_tokens == 16


def test_guesses_of_all_candidates_are_counted():
    ranking = BestOf(2, 1, 0, show_logprobs=False)
    for index in range(2):
        delta = ended(index, "x", 10)
        delta.num_draft_tokens, delta.num_accepted_tokens = 8, 5 + index
        shown = ranking.pass_through(delta, -1.0)
    assert (shown[0].num_draft_tokens, shown[0].num_accepted_tokens) == (16, 11)


def test_logprobs_leave_only_when_they_were_asked_for():
    for show_logprobs in (False, True):
        ranking = BestOf(1, 1, 0, show_logprobs=show_logprobs)
        (shown,) = ranking.pass_through(ended(0, "a", 1), -1.0)
        assert bool(shown.logprobs) is show_logprobs


def test_a_fault_leaves_at_once():
    ranking = BestOf(2, 1, 0, show_logprobs=False)
    fault = Delta(7, 1, "", 0, 0, finish_reason="error", error="the model failed")
    (shown,) = ranking.pass_through(fault, 0.0)
    assert (shown.index, shown.error) == (0, "the model failed")
