"""What is known so far of one OpenAI-shaped answer, shared by the lane that forwards bytes and the one that reads."""

from __future__ import annotations

from plugins.events import Started, Usage


class CallState:
    """One tool call. Nothing of it is shown before its name is known, for id and name come once and first."""

    __slots__ = ("announced", "has_arguments", "held_arguments", "id", "index", "name", "signature")

    def __init__(self, index: int, call_id: str = "", name: str = "") -> None:
        self.index = index  # as clients see it
        self.id = call_id
        self.name = name
        self.announced = False
        self.has_arguments = False
        self.held_arguments = ""
        self.signature = ""  # Gemini's, which must come back with the call


class ChoiceState:
    __slots__ = ("calls", "calls_by_upstream_index", "finished", "high_surrogate")

    def __init__(self) -> None:
        self.finished = False
        self.calls: list[CallState] = []
        self.calls_by_upstream_index: dict[int, CallState] = {}
        self.high_surrogate = ""  # first half of a character that the upstream cut in two


class AnswerState:
    __slots__ = ("choices", "num_finished", "started", "usage")

    def __init__(self) -> None:
        self.started: Started | None = None
        self.choices: dict[int, ChoiceState] = {}
        self.num_finished = 0
        self.usage: Usage | None = None

    def choice(self, index: int) -> ChoiceState:
        state = self.choices.get(index)
        if state is None:
            state = self.choices[index] = ChoiceState()
        return state

    def finish(self, choice: ChoiceState) -> None:
        """Once per choice."""
        choice.finished = True
        self.num_finished += 1

    def all_finished(self, at_least: int = 1) -> bool:
        """Whether that many choices have begun and every one that began has ended."""
        return self.num_finished >= at_least and self.num_finished == len(self.choices)
