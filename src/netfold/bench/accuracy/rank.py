"""What every rank runs: `python -m netfold.bench.accuracy.rank SETTINGS FOLDER`, SETTINGS as JSON.

RANK comes from the environment, NETFOLD_SWITCH too: every sum goes through that switch. Rank 0 writes what was found to
FOLDER/found.json, and a line on stdout for each training.
"""

import hashlib
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

import netfold.torch
from netfold import Options
from netfold.bench.accuracy import tensors
from netfold.bench.accuracy.formats import (
    FED_BACK,
    FIXED,
    FORMATS,
    HALF,
    WIRES,
    FixedPoint,
    fixed_point,
    half_in_switch,
)
from netfold.bench.accuracy.images import Images
from netfold.bench.accuracy.settings import TASKS, Settings
from netfold.bench.accuracy.text import Text

# Steps from which SwitchML's factor is found, with a seed of their own.
PROFILED_STEPS = 20
PROFILED_SEED = 99
_TASKS: dict[str, type[Images] | type[Text]] = {"images": Images, "text": Text}


class Sums:
    """A group for each wire format, all of the same ranks, made when it is first asked for."""

    def __init__(self) -> None:
        self._groups: dict[str, Any] = {}

    def group(self, wire: str) -> Any:
        if wire not in self._groups:
            self._groups[wire] = dist.new_group(backend="netfold", pg_options=Options(wire_dtype=wire))
        return self._groups[wire]

    def total(self, form: str, part: tensors.Floats, largest: float) -> tensors.Floats:
        """The sum over all ranks as `form` has it; `largest`: of the values that SwitchML was profiled with."""
        if form in WIRES:
            whole = torch.from_numpy(part.copy())
            dist.all_reduce(whole, group=self.group(form))
            return whole.numpy()
        ranks = dist.get_world_size()
        scheme = fixed_point(largest, ranks) if form == FIXED else half_in_switch(largest, ranks)
        integers = torch.from_numpy(scheme.to_integers(part))
        dist.all_reduce(integers, group=self.group("f32"))
        return scheme.to_floats(integers.numpy())


def measure_tensors(sums: Sums, elements: int) -> dict[str, Any]:
    """Of every format and kind the error, and what it makes of values that are no numbers."""
    found: dict[str, Any] = {"errors": {}, "specials": {}}
    for form in FORMATS:
        if form == FED_BACK:  # of a single sum the same as i8
            continue
        found["errors"][form] = {}
        for kind in tensors.KINDS:
            parts = [tensors.part(kind, rank, elements) for rank in range(dist.get_world_size())]
            largest = float(max(np.abs(each).max() for each in parts))
            got = sums.total(form, parts[dist.get_rank()], largest)
            found["errors"][form][kind] = asdict(tensors.error_of(got, parts))
        # Profiled where all was well.
        found["specials"][form] = tensors.specials_in(sums.total(form, tensors.special_part(dist.get_rank()), 1.0))
    return found


def average_as(scheme: FixedPoint, group: Any) -> Any:
    """A DDP hook: gradients as integers through the group's switch."""

    def average(state: None, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        integers = torch.from_numpy(scheme.to_integers(buffer.numpy()))

        def finish(_: Any) -> torch.Tensor:
            return buffer.copy_(torch.from_numpy(scheme.to_floats(integers.numpy())) / dist.get_world_size())

        summed: torch.futures.Future[Any] = dist.all_reduce(integers, group=group, async_op=True).get_future()
        return summed.then(finish)

    return average


def train(sums: Sums, task: str, form: str, seed: int, steps: int, largest: float, power: int = 0) -> dict[str, Any]:
    """What the trained model is worth on data that it has not seen. `largest`: of the profiled gradients."""
    torch.manual_seed(seed)
    kind = _TASKS[task]
    model = kind.model()
    group = sums.group(form if form in WIRES else "f32")
    replica = DistributedDataParallel(model, process_group=group)
    ranks = dist.get_world_size()
    if form == FED_BACK:
        netfold.torch.compress_gradients(replica)
    elif form in (FIXED, HALF):
        scheme = fixed_point(largest, ranks, power) if form == FIXED else half_in_switch(largest, ranks)
        replica.register_comm_hook(None, average_as(scheme, group))
    for _ in learn(kind, replica, seed, steps):
        pass
    found = {"task": task, "format": form, "seed": seed, "power": power, "agree": agree(model)}
    if dist.get_rank() == 0:
        # JSON has no word for NaN.
        found |= {name: value if math.isfinite(value) else None for name, value in kind(seed, 0).test(model).items()}
        print(json.dumps(found), flush=True)
    return found


def learn(kind: type[Images] | type[Text], replica: nn.Module, seed: int, steps: int) -> Iterator[None]:
    """Comes back after every step, with the gradients in place."""
    optimizer, work = kind.optimizer(replica), kind(seed, dist.get_rank())
    for step in range(steps):
        for each in optimizer.param_groups:
            each["lr"] = optimizer.defaults["lr"] * 0.5 * (1 + math.cos(math.pi * step / steps))
        optimizer.zero_grad()
        work.loss(replica, step).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        yield


def profile(task: str, steps: int) -> float:
    """The greatest magnitude of any rank's own gradient in the first steps of a training, as SwitchML finds it."""
    torch.manual_seed(PROFILED_SEED)
    kind = _TASKS[task]
    largest = torch.zeros(1)

    def watch(state: None, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        torch.maximum(largest, bucket.buffer().abs().max(), out=largest)
        buffer = bucket.buffer().div_(dist.get_world_size())
        summed: torch.futures.Future[Any] = dist.all_reduce(buffer, async_op=True).get_future()
        return summed.then(lambda done: buffer)

    replica = DistributedDataParallel(kind.model())
    replica.register_comm_hook(None, watch)
    for _ in learn(kind, replica, PROFILED_SEED, min(steps, PROFILED_STEPS)):
        pass
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest.item()


def agree(model: nn.Module) -> bool:
    """Whether all ranks have the same bits, NaN included."""
    digest = hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in model.parameters())).digest()
    mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
    all_of_them = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(all_of_them, mine)
    return all(torch.equal(each, mine) for each in all_of_them)


def main() -> None:
    settings, folder = Settings.from_json(sys.argv[1]), Path(sys.argv[2])
    started_s = time.monotonic()
    # More threads than this would have the ranks of one machine wait for each other's cores.
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    dist.init_process_group("netfold", init_method=f"file://{folder}/meet", rank=rank, world_size=settings.ranks)
    sums = Sums()
    found = measure_tensors(sums, settings.elements)
    found["trainings"], found["sweep"], found["parameters"] = [], [], {}
    largest = {task: profile(task, settings.steps) for task in TASKS}
    for task in TASKS:
        found["parameters"][task] = sum(each.numel() for each in _TASKS[task].model().parameters())
        for seed in settings.seeds:
            for form in FORMATS:
                found["trainings"].append(train(sums, task, form, seed, settings.steps, largest[task]))
    for power in settings.factors:
        for seed in settings.sweep_seeds:
            found["sweep"].append(train(sums, "images", FIXED, seed, settings.steps, largest["images"], power))
    found["seconds"] = time.monotonic() - started_s
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
