"""A recipe's step on one host with nobody to talk to: how long each part takes, and when each bucket is ready.

    python bench/one_host.py RECIPE FILE

The trainer believes that it is one of two ranks; its group is `Still`, whose every operation is done at once. What is
left of a step is all that is not communication: layers as timers (`timed_model`), and what the processor does round
them (autograd, buckets, the optimizer, the next batch), counted as processor time, so that what else runs on the
machine does not show. Medians over STEPS steps. The same once more with such steps on all other cores says how much
slower the processor is where cores share the memory's rate.
"""

# torch declares operations with overloads, of which one alone reaches a backend.
# mypy: disable-error-code="override"

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import tomllib
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

sys.path.insert(0, str(Path(__file__).parent))
from timed_model import First, LayerTime, layer_times, timed

from netfold.plan.model import ReadyBucket, TimedLayer, TimedStep
from netfold.train import Chain, Model, Recipe, Trainer
from netfold.train.datasets import make_data
from netfold.train.models import make_model

SETTLING, STEPS = 3, 8
BUCKET_MB = 25
RANKS = 2


class Still(dist.ProcessGroup):
    """Every operation is done at once: with what this rank gave. Told: bytes, and when."""

    def __init__(self, rank: int, size: int, told: Any) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # the stubs lack this overload
        self._told = told
        # torch reads a group's devices off its backends; the stubs do not know how this one is made.
        fake: Any = c10d.FakeProcessGroup
        anchor = fake._create_internal(rank, size, fake.Options())
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, anchor)

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return "still"

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        self._told("all_reduce", sum(tensor.nbytes for tensor in tensors))
        return _done(tensors)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        return _done(tensors)

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> Any:
        for parts, mine in zip(outputs, inputs, strict=True):
            for part in parts:
                part.copy_(mine)
        return _done(outputs)

    def barrier(self, opts: Any = None) -> Any:
        return _done([])


def _done(result: Any) -> Any:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(result)
    made: Any = c10d
    return made._create_work_from_future(future)


class Steps:
    """What happens on the training thread, event by event, and what ends a step."""

    def __init__(self) -> None:
        self.events: list[tuple[str, float, float]] = []
        self.steps: list[list[tuple[str, float, float]]] = []
        self.process_s: list[float] = []

    def note(self, what: str, value: float) -> None:
        """value: bytes of an operation, seconds of a timer; beside it the thread's processor time until now."""
        self.events.append((what, value, time.thread_time()))

    def on_start(self, event: Any) -> None: ...
    def on_step(self, event: Any) -> None:
        self.note("stepped", event.seconds)
        self.steps.append(self.events)
        self.process_s.append(time.process_time())
        self.events = []

    def on_evaluation(self, event: Any) -> None: ...
    def on_note(self, event: Any) -> None: ...
    def on_end(self, event: Any) -> None: ...


def recipe_of(path: str, size: int, steps: int) -> Recipe:
    """As it is trained here: of its batch, which two ranks share, each rank has the half, however many there are."""
    table = tomllib.loads(Path(path).read_text())
    table["training"] = {
        "steps": steps, "batch": max(1, table["training"].get("batch", 32) // 2), "scaling": "weak"
    }  # fmt: skip
    table["parallel"] = {"data": size, "bucket_mb": BUCKET_MB}
    table["checkpoint"] = {"every": "end"}
    return Recipe.model_validate(table)


def main(path: str, file: str) -> None:
    torch.set_num_threads(1)
    recipe = recipe_of(path, RANKS, SETTLING + STEPS)
    share = range(recipe.training.batch)
    times = layer_times(make_model(recipe.model), make_data(recipe.data).train.batch(share, share))
    alone = profile(path, recipe, times)
    with busy(path):
        crowded = profile(path, recipe, times)
    found = replace(alone, crowded=max(1.0, _host_s(crowded) / _host_s(alone)))
    kept = {"path": path, "profile": found.to_json(), "times": [asdict(each) for each in times]}
    Path(file).write_text(json.dumps(kept))


def profile(path: str, recipe: Recipe, times: Sequence[LayerTime]) -> TimedStep:
    steps = Steps()
    model = make_model(recipe.model)
    assert isinstance(model.module, Chain)
    names = list(model.module.layers)
    parameters = [sum(each.numel() for each in layer.parameters()) for layer in model.module.layers.values()]
    train(recipe, timed(model, times, steps.note), steps)
    return _profile(path, recipe.training.batch, names, parameters, steps)


def train(recipe: Recipe, model: Model, listener: Any) -> None:
    """As one of two ranks that talk to nobody."""
    dist.Backend.register_backend(
        "still", lambda store, rank, size, timeout: Still(rank, size, listener.note), devices=["cpu"]
    )
    dist.init_process_group("still", store=dist.HashStore(), rank=0, world_size=RANKS)
    data = make_data(recipe.data)
    few = replace(data, held_out=First(data.held_out, recipe.training.batch * RANKS))
    Trainer(recipe, model=model, data=few, callbacks=[listener]).fit()
    dist.destroy_process_group()


@contextlib.contextmanager
def busy(path: str) -> Iterator[None]:
    """Inside, every other core does what surrounds the layers of such steps, and nothing else."""
    command = [sys.executable, __file__, "--busy", path, str(os.getpid())]
    others = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        for _ in range((os.cpu_count() or 1) - 1)
    ]
    try:
        for other in others:
            assert other.stdout is not None
            if not other.stdout.readline():
                raise RuntimeError(f"{path}: the steps that should keep the other cores busy failed to begin")
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def keep_busy(path: str, asking: int) -> None:
    """Steps whose layers take no time, until the process `asking` is gone."""
    torch.set_num_threads(1)
    recipe = recipe_of(path, RANKS, 1_000_000)
    model = make_model(recipe.model)
    share = range(recipe.training.batch)
    times = layer_times(model, make_data(recipe.data).train.batch(share, share))
    train(recipe, timed(model, [replace(each, forward_s=0.0, backward_s=0.0) for each in times]), _Begun(asking))


class _Begun:
    """Says when steps have begun, and ends with the process that asked for them."""

    def __init__(self, asking: int) -> None:
        self._said = False
        self._asking = asking

    def note(self, what: str, value: float) -> None: ...
    def on_start(self, event: Any) -> None: ...
    def on_step(self, event: Any) -> None:
        if not self._said:
            print("begun", flush=True)
            self._said = True
        if os.getppid() != self._asking:
            raise SystemExit(1)

    def on_evaluation(self, event: Any) -> None: ...
    def on_note(self, event: Any) -> None: ...
    def on_end(self, event: Any) -> None: ...


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


if __name__ == "__main__":
    if sys.argv[1] == "--busy":
        keep_busy(sys.argv[2], int(sys.argv[3]))
    else:
        main(sys.argv[1], sys.argv[2])
