"""The demo's output: progress bars and a summary in a terminal, plain lines without a terminal."""

from __future__ import annotations

from types import TracebackType

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from netfold_lab.demo.experiment import Experiment
from netfold_lab.demo.settings import Run
from netfold_lab.demo.table import COLUMNS, notes, rows


class Steps:
    """A progress bar for each run; without a terminal, one line at the start and one at the end of each run."""

    def __init__(self, console: Console, runs: tuple[Run, ...]) -> None:
        self._console = console
        self._steps = {run.name: run.steps for run in runs}
        self._tasks: dict[str, TaskID] = {}
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=40),
            MofNCompleteColumn(),
            TextColumn("{task.fields[loss]}"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> Steps:
        self._progress.start()
        for name, steps in self._steps.items():
            self._tasks[name] = self._progress.add_task(name, total=steps, start=False, loss="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def stepped(self, name: str, step: int, loss: float) -> None:
        """Show a step of rank 0. loss: of rank 0's share."""
        if step == 1:
            self._progress.start_task(self._tasks[name])
        self._progress.update(self._tasks[name], completed=step, loss=f"loss {loss:.4f}")
        if not self._console.is_terminal and step in (1, self._steps[name]):
            self._console.print(f"{name}: step {step} of {self._steps[name]}, loss {loss:.4f}")


def print_summary(console: Console, story: Experiment, page: str) -> None:
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
    for index, column in enumerate(COLUMNS):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=True)
    for row in rows(story):
        table.add_row(*row)
    console.print(table)
    for note in notes(story.training):
        console.print(note, style="dim", highlight=False)
    console.print()
    console.print(f"losses, first {story.agreement.steps} steps: {story.agreement.in_words()}", highlight=False)
    console.print(f"report: {page}", highlight=False, soft_wrap=True)
