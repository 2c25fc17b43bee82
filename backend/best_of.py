"""`best_of`: more choices are generated than shown; shown are those with the highest mean log-probability."""

from __future__ import annotations

from dataclasses import dataclass, field

from backend.protocol import Delta


@dataclass(slots=True)
class BestOf:
    """The candidates of one prompt, held back until all of them have ended."""

    num_candidates: int
    num_shown: int  # n
    first_index: int  # of the choices that are shown
    show_logprobs: bool
    _deltas: dict[int, list[Delta]] = field(default_factory=dict[int, list[Delta]])
    _ended: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])

    def pass_through(self, delta: Delta, mean_logprob: float) -> list[Delta]:
        """What may leave now. `delta.index` tells candidates apart; what leaves has the index of a choice."""
        if delta.error:
            delta.index = self.first_index
            return [delta]
        self._deltas.setdefault(delta.index, []).append(delta)
        if delta.finish_reason is None:
            return []
        self._ended.append((-mean_logprob, delta.index))
        return self._best() if len(self._ended) == self.num_candidates else []

    def _best(self) -> list[Delta]:
        best = sorted(self._ended)[: self.num_shown]
        shown = [self._joined(candidate, k) for k, (_, candidate) in enumerate(best)]
        # The first choice carries what the request cost beyond what it shows. The prompt is counted once, and
        # the first candidate knows how much of it the cache saved: the others found what that one computed.
        lasts = [deltas[-1] for deltas in self._deltas.values()]
        for name in ("num_output_tokens", "num_draft_tokens", "num_accepted_tokens"):
            hidden = sum(getattr(d, name) for d in lasts) - sum(getattr(d, name) for d in shown)
            setattr(shown[0], name, getattr(shown[0], name) + hidden)
        shown[0].num_cached_tokens = self._deltas[min(self._deltas)][-1].num_cached_tokens
        return shown

    def _joined(self, candidate: int, k: int) -> Delta:
        deltas = self._deltas[candidate]
        last = deltas[-1]
        return Delta(
            last.request_id,
            self.first_index + k,
            "".join(delta.text for delta in deltas),
            last.num_output_tokens,
            last.num_cached_tokens,
            [entry for delta in deltas for entry in delta.logprobs] if self.show_logprobs else [],
            last.finish_reason,
            last.stop_reason,
            num_draft_tokens=last.num_draft_tokens,
            num_accepted_tokens=last.num_accepted_tokens,
        )
