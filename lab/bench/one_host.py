"""A recipe's step on one host without communication: how long each part takes, and when each bucket is ready.

    .venv/bin/python lab/bench/one_host.py RECIPE FILE

The trainer believes that it is one of two ranks; its group is `Still`, whose every operation is done at once. What is
left of a step is all that is not communication: layers as timers (`timed_model`), and what the processor does around
them (autograd, buckets, the optimizer, the next batch), counted as processor time, so that what else runs on the
machine does not show. Medians over STEPS steps. A second profile, with such steps on all other cores, shows how much
slower the processor is where cores share the memory's rate.
"""

# torch declares operations with overloads, of which one alone reaches a backend.
# mypy: disable-error-code="override"

from __future__ import annotations

import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import driver
import torch
import torch.distributed as dist
from driver import Place, Rank, open_network, start_ranks
from timed_model import LayerTime, few_held_out, layer_times, recipe_of, timed
from torch._C import _distributed_c10d as c10d

from netfold_plan.model import ReadyBucket, TimedLayer, TimedStep
from netfold_train import Chain, Model, Recipe, Trainer
from netfold_train.callbacks.events import Callback
from netfold_train.data import make_data
from netfold_train.models import make_model

SETTLING, STEPS = 3, 8
RANKS = 2


class Still(dist.ProcessGroup):
    """Every operation is done at once, with this rank's own values. `note` is called with the bytes."""

    def __init__(self, rank: int, size: int, note: Any) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # the stubs lack this overload
        self._note = note
        # torch reads a group's devices from its backends; the stubs do not know this constructor.
        fake: Any = c10d.FakeProcessGroup
        anchor = fake._create_internal(rank, size, fake.Options())
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, anchor)

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return "still"

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        self._note("all_reduce", sum(tensor.nbytes for tensor in tensors))
        return _done(tensors)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        return _done(tensors)

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> Any:
        for parts, own in zip(outputs, inputs, strict=True):
            for part in parts:
                part.copy_(own)
        return _done(outputs)

    def barrier(self, opts: Any = None) -> Any:
        return _done([])


def _done(result: Any) -> Any:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(result)
    made: Any = c10d
    return made._create_work_from_future(future)


Event = tuple[str, float, float]
"""An event on the training thread; an operation's bytes or a timer's seconds; the thread's processor time."""


class Steps(Callback):
    """The events of each step."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.steps: list[list[Event]] = []
        self.process_s: list[float] = []

    def note(self, what: str, value: float) -> None:
        self.events.append((what, value, time.thread_time()))

    def on_step(self, event: Any) -> None:
        self.note("stepped", event.seconds)
        self.steps.append(self.events)
        self.process_s.append(time.process_time())
        self.events = []


def measure(path: str) -> dict[str, Any]:
    """The profile of the recipe's step, its layers' times, and the recipe's path, as JSON has them."""
    with open_network(Place(1)) as network, start_ranks(network, profiler, path) as alone:
        profile, times = alone.ask()[0]
        others = [0] * ((os.cpu_count() or 1) - 1)
        with start_ranks(network, keep_busy, path, hosts=others):
            crowded, _ = alone.ask()[0]
    found = replace(profile, crowded=max(1.0, _host_s(crowded) / _host_s(profile)))
    return {"path": path, "profile": asdict(found), "times": [asdict(each) for each in times]}


def profiler(me: Rank, path: str) -> None:
    """A process that trains alone. An order: the profile of a step, and the layers' times."""
    recipe = recipe_of(path, RANKS, SETTLING + STEPS)
    times = layer_times(recipe)

    def profile() -> tuple[TimedStep, list[LayerTime]]:
        steps = Steps()
        model = make_model(recipe.model)
        assert isinstance(model.module, Chain)
        names = list(model.module.layers)
        parameters = [sum(each.numel() for each in layer.parameters()) for layer in model.module.layers.values()]
        train(recipe, timed(model, times, steps.note), steps)
        return _profile(path, recipe.training.batch, names, parameters, steps), times

    me.serve(profile)


def train(recipe: Recipe, model: Model, callback: Any) -> None:
    """Train as one of two ranks, without communication."""
    dist.Backend.register_backend(
        "still", lambda store, rank, size, timeout: Still(rank, size, callback.note), devices=["cpu"]
    )
    dist.init_process_group("still", store=dist.HashStore(), rank=0, world_size=RANKS)
    few = few_held_out(make_data(recipe.data), recipe.training.batch * RANKS)
    Trainer(recipe, model=model, data=few, callbacks=[callback]).fit()
    dist.destroy_process_group()


def keep_busy(me: Rank, path: str) -> None:
    """A process that trains with layers that take no time, and is ready when steps have begun."""
    recipe = recipe_of(path, RANKS, 1_000_000)
    times = [replace(each, forward_s=0.0, backward_s=0.0) for each in layer_times(recipe)]

    class Begun(Callback):
        serving: threading.Thread | None = None

        def note(self, what: str, value: float) -> None: ...
        def on_step(self, event: Any) -> None:
            if self.serving is None:
                self.serving = threading.Thread(target=self.serve)
                self.serving.start()

        def serve(self) -> None:
            me.serve(lambda: None)
            os._exit(0)

    train(recipe, timed(make_model(recipe.model), times), Begun())


def _host_s(found: TimedStep) -> float:
    layers = sum(layer.forward_host_s + layer.backward_host_s for layer in found.timed)
    return layers + sum(bucket.host_s for bucket in found.ready) + found.closing_host_s + found.updating_host_s


def _profile(path: str, share: int, names: list[str], parameters: list[int], steps: Steps) -> TimedStep:
    count = len(names)
    rows = [
        _row(steps.steps[at - 1][-1][2], steps.steps[at], count, steps.process_s[at] - steps.process_s[at - 1])
        for at in range(SETTLING, SETTLING + STEPS)
    ]

    def middle(of: Callable[[_Row], float]) -> float:
        return statistics.median(of(row) for row in rows)

    def layer(at: int) -> TimedLayer:
        back = 2 * count - 1 - at
        return TimedLayer(
            names[at],
            parameters[at],
            middle(lambda row: row.slept_s[at]),
            middle(lambda row: row.slept_s[back]),
            middle(lambda row: row.host_s[at]),
            middle(lambda row: row.host_s[back]),
        )

    shapes = {tuple((size, layers) for size, layers, _ in row.buckets) for row in rows}
    if len(shapes) != 1:
        raise RuntimeError(f"{path}: buckets differ from step to step: {sorted(shapes)}; settle for more steps")
    return TimedStep(
        name=Path(path).stem,
        samples=share,
        timed=tuple(layer(at) for at in range(count)),
        ready=tuple(
            ReadyBucket(size, layers, middle(lambda row, at=at: row.buckets[at][2]))  # type: ignore[misc]
            for at, (size, layers) in enumerate(shapes.pop())
        ),
        closing_host_s=middle(lambda row: row.closing_s),
        vote_bytes=rows[0].vote_bytes,
        updating_host_s=middle(lambda row: row.update_s),
        beside_host_s=max(0.0, middle(lambda row: row.beside_s)),
    )


@dataclass(frozen=True)
class _Row:
    """One step. slept_s: timers; host_s: the processor's seconds before each; buckets: bytes, layers through their
    backward pass, the processor's seconds since the timer or the bucket before."""

    slept_s: list[float]
    host_s: list[float]
    buckets: list[tuple[int, int, float]]
    vote_bytes: int
    closing_s: float
    update_s: float
    beside_s: float


def _row(began_s: float, events: list[tuple[str, float, float]], count: int, process_s: float) -> _Row:
    slept_s, host_s, operations = [], [], []
    last_s = began_s
    for what, value, now_s in events:
        if what == "slept":
            slept_s.append(value)
            host_s.append(now_s - last_s)
        elif what == "all_reduce":
            operations.append((int(value), len(slept_s) - count, now_s - last_s))
        else:
            update_s = now_s - last_s
        last_s = now_s
    *buckets, (vote_bytes, _, closing_s) = operations
    return _Row(slept_s, host_s, buckets, vote_bytes, closing_s, update_s, process_s - (last_s - began_s))


if __name__ == "__main__" and not driver.be_rank():
    Path(sys.argv[2]).write_text(json.dumps(measure(sys.argv[1])))
