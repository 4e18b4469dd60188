"""The work of every rank of the accuracy benchmark, as commands of `netfold_lab.bench.rank`.

The variable NETFOLD_SWITCH names the switch through which every sum goes.
"""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

import netfold.torch
from netfold import Options
from netfold_lab.bench.accuracy import tensors
from netfold_lab.bench.accuracy.formats import (
    FED_BACK,
    FIXED,
    FORMATS,
    HALF,
    WIRES,
    FixedPoint,
    fixed_point,
    half_in_switch,
)
from netfold_lab.bench.accuracy.images import Images
from netfold_lab.bench.accuracy.text import Text

# The steps in which SwitchML's factor is found, with a seed of their own.
PROFILED_STEPS = 20
PROFILED_SEED = 99
_TASKS: dict[str, type[Images] | type[Text]] = {"images": Images, "text": Text}


class Accuracy:
    """The commands. The ranks have a group for each wire format, made when it is first needed."""

    def __init__(self) -> None:
        self._groups: dict[str, Any] = {}

    def measure_tensors(self, elements: int) -> dict[str, Any]:
        """Return the error for every format and kind of tensor, and what each format makes of special values."""
        found: dict[str, Any] = {"errors": {}, "specials": {}}
        rank, ranks = dist.get_rank(), dist.get_world_size()
        for form in FORMATS:
            if form == FED_BACK:  # a single sum is the same as by i8
                continue
            found["errors"][form] = {}
            for kind in tensors.KINDS:
                parts = [tensors.part(kind, each, elements) for each in range(ranks)]
                largest = float(max(np.abs(each).max() for each in parts))
                got = self._sum(form, parts[rank], largest)
                found["errors"][form][kind] = asdict(tensors.error_of(got, parts))
            # SwitchML's factor was found where all values were ones.
            found["specials"][form] = tensors.specials_in(self._sum(form, tensors.special_part(rank), 1.0))
        return found

    def count_parameters(self, task: str) -> int:
        return sum(each.numel() for each in _TASKS[task].model().parameters())

    def profile(self, task: str, steps: int) -> float:
        """Return the greatest magnitude of any rank's gradient in a training's first steps, as SwitchML finds it."""
        torch.manual_seed(PROFILED_SEED)
        kind, group = _TASKS[task], self._group("f32")
        largest = torch.zeros(1)

        def watch(state: None, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
            torch.maximum(largest, bucket.buffer().abs().max(), out=largest)
            buffer = bucket.buffer().div_(dist.get_world_size())
            summed: torch.futures.Future[Any] = dist.all_reduce(buffer, group=group, async_op=True).get_future()
            return summed.then(lambda done: buffer)

        replica = DistributedDataParallel(kind.model(), process_group=group)
        replica.register_comm_hook(None, watch)
        for _ in _learn(kind, replica, PROFILED_SEED, min(steps, PROFILED_STEPS)):
            pass
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return largest.item()

    def train(self, task: str, form: str, seed: int, steps: int, largest: float, power: int) -> dict[str, Any]:
        """Train a model; return whether the ranks agree and, on rank 0, loss (None: NaN) and accuracy on unseen data.

        largest: of the profiled gradients; power: as in fixed_point.
        """
        torch.manual_seed(seed)
        kind = _TASKS[task]
        model = kind.model()
        group = self._group(form if form in WIRES else "f32")
        replica = DistributedDataParallel(model, process_group=group)
        if form == FED_BACK:
            netfold.torch.compress_gradients(replica)
        elif form in (FIXED, HALF):
            replica.register_comm_hook(None, _average_as(_scheme(form, largest, power), group))
        for _ in _learn(kind, replica, seed, steps):
            pass
        found = {"task": task, "format": form, "seed": seed, "power": power, "agree": _agree(model)}
        if dist.get_rank() == 0:
            tested = kind(seed, 0).test(model)
            found |= {name: value if math.isfinite(value) else None for name, value in tested.items()}
        return found

    def _group(self, wire: str) -> Any:
        if wire not in self._groups:
            options = Options(wire_dtype=wire, algorithm="auto")
            self._groups[wire] = dist.new_group(backend="netfold", pg_options=options)
        return self._groups[wire]

    def _sum(self, form: str, part: tensors.Floats, largest: float) -> tensors.Floats:
        """Return the sum over all ranks as `form` has it; `largest`: of the values that SwitchML was profiled with."""
        if form in WIRES:
            whole = torch.from_numpy(part.copy())
            dist.all_reduce(whole, group=self._group(form))
            return whole.numpy()
        scheme = _scheme(form, largest)
        integers = torch.from_numpy(scheme.to_integers(part))
        dist.all_reduce(integers, group=self._group("f32"))
        return scheme.to_floats(integers.numpy())


def _scheme(form: str, largest: float, power: int = 0) -> FixedPoint:
    ranks = dist.get_world_size()
    return fixed_point(largest, ranks, power) if form == FIXED else half_in_switch(largest, ranks)


def _average_as(scheme: FixedPoint, group: Any) -> Any:
    """Return a DDP hook that averages gradients as integers through the group's switch."""

    def average(state: None, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        integers = torch.from_numpy(scheme.to_integers(buffer.numpy()))

        def finish(_: Any) -> torch.Tensor:
            return buffer.copy_(torch.from_numpy(scheme.to_floats(integers.numpy())) / dist.get_world_size())

        summed: torch.futures.Future[Any] = dist.all_reduce(integers, group=group, async_op=True).get_future()
        return summed.then(finish)

    return average


def _learn(kind: type[Images] | type[Text], replica: nn.Module, seed: int, steps: int) -> Iterator[None]:
    """Train; yield after every step, with the gradients in place."""
    optimizer, work = kind.optimizer(replica), kind(seed, dist.get_rank())
    for step in range(steps):
        for each in optimizer.param_groups:
            each["lr"] = optimizer.defaults["lr"] * 0.5 * (1 + math.cos(math.pi * step / steps))
        optimizer.zero_grad()
        work.loss(replica, step).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        yield


def _agree(model: nn.Module) -> bool:
    """Return whether all ranks have the same bits in every parameter, NaN included."""
    digest = hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in model.parameters())).digest()
    mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, mine)
    return all(torch.equal(each, mine) for each in gathered)
