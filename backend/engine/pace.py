"""How long a step may take, and how many rows fit in that: background work runs in the slack of online deadlines.

Every online row that decodes has a deadline for its next token: first token + tokens since x its TPOT objective. Tokens
that came early make slack, which background rows may use up. Where no objective is given, background work may make an
online step half as long again. While an online prompt waits for its first token there is little room, or none.
"""

from __future__ import annotations

from collections.abc import Sequence

from backend.engine.request import EngineRequest

MIN_CHUNK = 32  # rows of prefill that a step always has room for: below, its fixed costs prevail
IDLE_STEP_S = 0.1  # a step without online work: an arrival waits for its end
DECODE_STRETCH = 1.5  # of an online step whose rows have no TPOT objective
PREFILL_STRETCH = 1.2  # of a step with online prefill in it
PREFILL_GAP, BACKGROUND_GAP = (
    4.0,
    1.5,
)  # TPOT objectives between two tokens, where there is slack for it
SAFETY = 0.9  # of a TPOT objective is aimed at
_PRIOR_S_PER_ROW = 0.001
_DECAY = 0.95  # of a step's weight, with each step after it
_MAX_SURPRISE = (
    4.0  # x the expected time: what another program cost us must not be taken for our own
)


class StepTime:
    """Seconds that a step of n rows takes: a straight line through the steps of late, by weighted least squares.

    Until steps of different sizes were seen, the time is taken as proportional to the rows: it errs on the long side.
    """

    def __init__(self) -> None:
        self._weight = self._rows = self._seconds = 0.0  # sums over steps
        self._rows_rows = self._rows_seconds = 0.0
        self.base_s = 0.0
        self.seconds_per_row = _PRIOR_S_PER_ROW

    @property
    def is_known(self) -> bool:
        return self._weight > 0.0

    def add(self, num_rows: int, seconds: float) -> None:
        if seconds <= 0.0 or num_rows == 0:
            return
        if self.is_known:
            seconds = min(seconds, _MAX_SURPRISE * self.seconds(num_rows))
        self._weight = _DECAY * self._weight + 1.0
        self._rows = _DECAY * self._rows + num_rows
        self._seconds = _DECAY * self._seconds + seconds
        self._rows_rows = _DECAY * self._rows_rows + num_rows * num_rows
        self._rows_seconds = _DECAY * self._rows_seconds + num_rows * seconds
        self._fit()

    def seconds(self, num_rows: int) -> float:
        return self.base_s + num_rows * self.seconds_per_row

    def rows_within(self, seconds: float) -> int:
        return max(0, int((seconds - self.base_s) / self.seconds_per_row + 1e-6))

    def _fit(self) -> None:
        mean_rows, mean_s = self._rows / self._weight, self._seconds / self._weight
        variance = self._rows_rows / self._weight - mean_rows * mean_rows
        covariance = self._rows_seconds / self._weight - mean_rows * mean_s
        proportional = mean_s / mean_rows
        doubt = (0.1 * mean_rows) ** 2  # of a slope that rests on steps of nearly the same size
        slope = (covariance + doubt * proportional) / (variance + doubt)
        self.seconds_per_row = min(max(slope, 0.01 * proportional), proportional)
        self.base_s = mean_s - self.seconds_per_row * mean_rows


class Pace:
    """Turns deadlines into rows, by what steps have taken so far."""

    def __init__(self) -> None:
        self.step_time = StepTime()

    def prefill_rows(self, decoding: Sequence[EngineRequest], now_s: float) -> int | None:
        """Rows of online prefill beside these online decoding rows; None: no objective limits it."""
        limit_s = _tightest_s(decoding, now_s, PREFILL_GAP)
        if limit_s is None or not self.step_time.is_known:
            return None
        return max(MIN_CHUNK, self.step_time.rows_within(limit_s) - len(decoding))

    def background_rows(
        self,
        num_online_rows: int,
        decoding: Sequence[EngineRequest],
        prefilling: Sequence[EngineRequest],
        now_s: float,
    ) -> int | None:
        """Background rows beside `num_online_rows` of one step; None: no limit is known.

        `decoding` and `prefilling` are the online requests, those that wait for admission among the latter.
        """
        if not self.step_time.is_known:
            return None
        online_s = self.step_time.seconds(num_online_rows)
        limits = [DECODE_STRETCH * online_s] if _any_without_objective(decoding) else []
        if (tightest_s := _tightest_s(decoding, now_s, BACKGROUND_GAP)) is not None:
            limits.append(tightest_s)
        if prefilling:
            limits.append(self._beside_prefill_s(online_s, prefilling, now_s))
        # One row is always let in beside decoding ones: what rows cost shows only in steps of different sizes.
        return max(
            0 if prefilling else 1, self.step_time.rows_within(min(limits)) - num_online_rows
        )

    def idle_rows(self, num_decoding: int) -> int | None:
        """Rows of a step that nobody waits for, all those that decode among them; None: no limit is known."""
        if not self.step_time.is_known:
            return None
        return max(num_decoding + MIN_CHUNK, self.step_time.rows_within(IDLE_STEP_S))

    def _beside_prefill_s(
        self, online_s: float, prefilling: Sequence[EngineRequest], now_s: float
    ) -> float:
        """Nothing more than the online step itself when the prompts need half of what is left to their deadlines."""
        laxity_s = min(request.deadline_s for request in prefilling) - now_s
        num_rows = sum(request.num_wanted_tokens for request in prefilling)
        backlog_s = num_rows * self.step_time.seconds_per_row
        return 0.0 if 1.3 * backlog_s > 0.5 * laxity_s else PREFILL_STRETCH * online_s


def _any_without_objective(decoding: Sequence[EngineRequest]) -> bool:
    return any(request.tpot_s is None for request in decoding)


def _tightest_s(
    decoding: Sequence[EngineRequest], now_s: float, longest_gap: float
) -> float | None:
    """How long a step may take for all next tokens to come in time; None: none of these has an objective.

    No gap is longer than `longest_gap` objectives, however early the tokens so far came, nor shorter than half of one.
    """
    allowed: list[float] = []
    for request in decoding:
        if request.tpot_s is not None:
            tpot_s = SAFETY * request.tpot_s
            left_s = request.next_token_due_s(tpot_s) - now_s
            allowed.append(min(max(left_s, 0.5 * tpot_s), longest_gap * tpot_s))
    return min(allowed) if allowed else None
