"""Runs the accuracy benchmark on this machine, with a switch, and collects the results."""

import json
import time
from collections.abc import Callable
from typing import Any

from netfold_lab.bench.accuracy.formats import FIXED, FORMATS
from netfold_lab.bench.accuracy.settings import TASKS, Settings
from netfold_lab.bench.config import BenchEnvironment
from netfold_lab.bench.runner import start_runner


def measure_accuracy(settings: Settings, say: Callable[[str], None], deadline_s: float) -> dict[str, Any]:
    """Measure everything that report.render shows; `say` gets a line of JSON for each training.

    Raises BenchError; RackError where the switch cannot start. No process is left.
    """
    place = BenchEnvironment(settings.ranks, switch=True, deadline_s=deadline_s)
    with start_runner(place, ["torch"]) as runner:

        def tell(what: str, **arguments: Any) -> Any:
            return runner.tell("torch", "accuracy", what=what, **arguments)[0]["found"]

        def train(task: str, form: str, seed: int, power: int = 0) -> dict[str, Any]:
            what = {"task": task, "form": form, "seed": seed, "power": power}
            found: dict[str, Any] = tell("train", **what, steps=settings.steps, largest=largest[task])
            say(json.dumps(found))
            return found

        started_s = time.monotonic()
        found = tell("measure_tensors", elements=settings.elements)
        largest = {task: tell("profile", task=task, steps=settings.steps) for task in TASKS}
        found["parameters"] = {task: tell("count_parameters", task=task) for task in TASKS}
        found["trainings"] = [train(task, form, seed) for task in TASKS for seed in settings.seeds for form in FORMATS]
        found["sweep"] = [
            train("images", FIXED, seed, power) for power in settings.factors for seed in settings.sweep_seeds
        ]
        found["seconds"] = time.monotonic() - started_s
        return dict(found)
