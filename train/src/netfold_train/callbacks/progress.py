"""Show a run on the screen of rank 0: one live line in a terminal, otherwise a line every 10 s."""

from __future__ import annotations

import atexit
import time
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.text import Text

from netfold import units
from netfold.console import plain_console
from netfold_train.callbacks.events import Callback, Ended, Evaluated, Noted, Started, Stepped
from netfold_train.runs import PAGE
from netfold_train.runs.metrics import read_metrics, with_unit

LIVE_S = 0.25
PLAIN_S = 10.0
_COLOURS = {"warning": "yellow", "error": "bold red"}
# The weight of the newest step in the mean time of a step.
_NEWEST = 0.1


class ProgressCallback(Callback):
    """Writes to stderr. The time left is that of steps, without evaluations."""

    def __init__(self, folder: Path, console: Console | None = None) -> None:
        self._folder = folder
        self._console = console or plain_console(stderr=True, highlight=False, soft_wrap=True)
        self._live: Live | None = None
        self._shown_s = 0.0
        self._step_s: float | None = None

    def on_start(self, event: Started) -> None:
        self._start, self._shown_s = event, 0.0
        recipe = event.recipe
        goes_on = f", continuing after step {event.step}" if event.step else ""
        self._print(
            f"{recipe.model.name} on {recipe.data.name}: {event.parameters:,} parameters, {event.steps:,} steps of "
            f"{event.batch:,} samples, {units.plural(event.ranks, 'rank')}{goes_on}; in {self._folder}"
        )
        if self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
            # An exception must leave a terminal with a visible cursor.
            atexit.register(self._leave)

    def on_step(self, event: Stepped) -> None:
        before = event.seconds if self._step_s is None else self._step_s
        self._step_s = before + _NEWEST * (event.seconds - before)
        now_s = time.monotonic()
        if now_s - self._shown_s < (LIVE_S if self._live else PLAIN_S):
            return
        self._shown_s = now_s
        line = self._line(event, self._step_s)
        if self._live is not None:
            self._live.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=True)
        else:
            self._print(line)

    def on_evaluation(self, event: Evaluated) -> None:
        metric = self._start.metric
        value = event.values[metric.name]
        self._print(
            f"step {event.step:,}: {metric.name} {with_unit(value, metric.unit)} on held-out samples, "
            f"{metric.baseline_is} {with_unit(metric.baseline, metric.unit)}, in {units.seconds(event.seconds)}"
        )

    def on_note(self, event: Noted) -> None:
        self._print(f"step {event.step:,}: {event.text}", _COLOURS.get(event.level, ""))

    def on_end(self, event: Ended) -> None:
        self._leave()
        if cost := read_metrics(self._folder).cost_of_failures:
            self._print(cost)
        took = f"after step {event.step:,}, in {units.seconds(event.seconds)}"
        self._print(f"done {took}" if event.reason == "done" else f"ended {took}: {event.reason}", "bold")
        self._print(f"the page: {self._folder / PAGE}")

    def _line(self, event: Stepped, step_s: float) -> str:
        start, exposed = self._start, "-" if event.exposed is None else f"~{event.exposed:.0%}"
        return (
            f"step {event.step:,}/{start.steps:,}  loss {event.loss:.4g}  lr {event.lr:.2e}  "
            f"{start.batch / step_s:.4g} samples/s  exposed {exposed}  "
            f"{units.seconds((start.steps - event.step) * step_s)} left"
        )

    def _print(self, text: str, style: str = "") -> None:
        self._console.print(Text(text, style=style))

    def _leave(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
            atexit.unregister(self._leave)
