"""A progress bar on stderr; without a terminal it draws nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.progress import TimeRemainingColumn as RemainingColumn


class Shown:
    """One bar: what is done of it, and a word beside it."""

    def __init__(self, bar: Progress, task: TaskID) -> None:
        self._bar, self._task = bar, task
        self._num_tokens = 0

    def advance(self, count: int) -> None:
        self._bar.advance(self._task, count)

    def tell(self, text: str) -> None:
        self._bar.update(self._task, told=text)

    def note(self, num_tokens: int) -> None:
        """Tokens were generated."""
        self._num_tokens += num_tokens
        self.tell(f"{self._num_tokens} tokens")


@contextmanager
def progress(description: str, total: int) -> Iterator[Shown]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        RemainingColumn(),
        TextColumn("{task.fields[told]}"),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        yield Shown(bar, bar.add_task(description, total=total, told=""))
