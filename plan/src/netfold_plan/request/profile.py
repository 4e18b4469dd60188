"""A profile's folder as a model for the planner: the step of its ranks, and the network that it shows.

A step is a rank's computing and its exposed communication (`netfold.profile.overlap`). The computing is assumed to be
the same on any network; each all_reduce is predicted on another network, from the moment when its gradients are ready.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from netfold import units
from netfold.profile.columns import Columns, Floats, Integers, columns_of
from netfold.profile.overlap import find_overlap
from netfold.profile.run import Run, Trace, read_run
from netfold.tuning.cost import HALVES, INTEGERS
from netfold.tuning.profile_link import SMALL_BYTES, Fitted, fit, observe_groups
from netfold.tuning.topology import DEFAULT_LINKS
from netfold_plan.cluster import Cluster, Device, Tier
from netfold_plan.job import PRECISIONS
from netfold_plan.model import Profiled

# Fewer equal steps give no reliable median.
_LEAST_STEPS = 5
# The least part of a step that gets a note.
_WORTH_A_NOTE = 0.02
# As many as in the presets of ordinary Ethernet.
_MOST_HOSTS = 1024
_ITEM_BYTES = {"f32": 4, "f16": 2, "bf16": 2, "f64": 8}


@dataclass(frozen=True)
class ProfiledJob:
    """The step of a profile, its device, and its own network, or the reason why the network is unknown.

    gradient_bytes: of a reduced element.
    """

    model: Profiled
    device: Device
    network: Cluster | str
    precision: str
    gradient_bytes: int

    def of_samples(self, samples: int) -> ProfiledJob:
        """The same profile with so many samples in a rank's share of a step."""
        return replace(self, model=replace(self.model, samples=samples))


def read_profile(folder: Path) -> ProfiledJob:
    """Read a folder. A rank's share of a step counts as one sample: a profile does not record samples.

    Raises ValueError, in one sentence, for a folder without a profile, a profile without training, and operations of
    which only the submission is known.
    """
    run = read_run(folder)
    size = max(trace.metadata.size for trace in run.traces)
    if len(run.traces) < size:
        raise ValueError(f"{folder}: {len(run.traces)} of {size} ranks left records; put all their folders together")
    columns = columns_of(run)
    ranks = [_steps(folder, trace, each) for trace, each in zip(run.traces, columns, strict=True)]
    # Pairs of consecutive steps, as many as all ranks have, in which all ranks made the same all_reduces.
    together = list(zip(*ranks, strict=False))
    pairs = [each for each in pairwise(together) if len({step.signature for steps in each for step in steps}) == 1]
    if not pairs:
        raise ValueError(
            f"{folder}: no two consecutive steps in which all ranks made the same all_reduces; record a longer run of "
            "data-parallel training"
        )
    signature = Counter(steps[0].signature for _, steps in pairs).most_common(1)[0][0]
    cycles = [_cycle(before, steps) for before, steps in pairs if steps[0].signature == signature]
    if not signature:
        raise ValueError(f"{folder}: its steps have no all_reduce; only data-parallel training can be planned")
    if len(cycles) < _LEAST_STEPS:
        raise ValueError(
            f"{folder}: {len(cycles)} of its steps follow an equal step, and a median needs at least {_LEAST_STEPS}; "
            "record a longer run"
        )
    first = columns[0]
    sharded = float(first.bytes[np.isin(first.operation, ("all_gather", "reduce_scatter"))].sum())
    if sharded > float(first.bytes[first.operation == "all_reduce"].sum()):
        raise ValueError(
            f"{folder}: {units.size(sharded)} of all_gather and reduce_scatter beside fewer bytes of all_reduce: its "
            "weights are sharded (FSDP, ZeRO), and only data-parallel training can be planned from a profile; give the "
            "model by its dimensions, with --zero 3"
        )
    ready = np.median(np.array([each.ready_s for each in cycles]), axis=0)
    computed, update, wall, exposed, others = (
        float(np.median([getattr(each, name) for each in cycles]))
        for name in ("computed_s", "update_s", "wall_s", "exposed_s", "others_s")
    )
    dtypes = {dtype for dtype, _, _ in signature}
    if unknown := dtypes - set(_ITEM_BYTES):
        raise ValueError(
            f"{folder}: all_reduces of {', '.join(sorted(unknown))} are not gradients; move them out of a step"
        )
    widest = max(dtypes, key=lambda dtype: _ITEM_BYTES[dtype])
    model = Profiled(
        name=str(folder),
        samples=1,
        ready_s=tuple(float(each) for each in np.maximum.accumulate(ready)),
        bucket_bytes=tuple(size_bytes * _on_the_wire(dtype, wire) for dtype, size_bytes, wire in signature),
        computed_s=max(computed, float(ready.max())),
        update_s=update,
        parameters=float(sum(size_bytes / _ITEM_BYTES[dtype] for dtype, size_bytes, _ in signature)),
        ranks=size,
        step_s=wall,
        exposed_s=exposed,
        notes=tuple(_notes(len(together) - 1, len(cycles), others, wall)),
    )
    precision = widest if widest in PRECISIONS else "f32"
    device = _device(precision)
    return ProfiledJob(model, device, _network(run, str(folder), device), precision, _ITEM_BYTES[widest])


@dataclass(frozen=True)
class _Step:
    """One step of one rank.

    signature: dtype, bytes and wire format of each all_reduce, in the order of submission.
    ready_s: seconds of computing before each all_reduce.
    computed_s: seconds of computing until the last all_reduce is done. update_s: after that.
    others_s: the part of exposed_s of operations other than all_reduce.
    """

    signature: tuple[tuple[str, int, str], ...]
    ready_s: Floats
    computed_s: float
    update_s: float
    wall_s: float
    exposed_s: float
    others_s: float


def _cycle(before: Sequence[_Step], steps: Sequence[_Step]) -> _Step:
    """Combine one step of all ranks: means, except for ready_s and computed_s, which depend on the last rank.

    All ranks continued together after the last all_reduce of the step before, so times are compared from there.
    """
    updated = np.array([step.update_s for step in before])

    def last(since_s: Sequence[Floats] | Sequence[float]) -> Any:
        return (updated + np.array(since_s).T).max(axis=-1) - updated.mean()

    means = {
        name: float(np.mean([getattr(step, name) for step in steps]))
        for name in ("update_s", "wall_s", "exposed_s", "others_s")
    }
    ready, computed = last([step.ready_s for step in steps]), last([step.computed_s for step in steps])
    return _Step(signature=steps[0].signature, ready_s=ready, computed_s=float(computed), **means)


def _steps(folder: Path, trace: Trace, columns: Columns) -> list[_Step]:
    about, records, exposure = trace.metadata, trace.operations, find_overlap(trace)
    if not len(trace.steps):
        raise ValueError(
            f"{folder}: rank {about.rank} recorded no step of training; call netfold.profile.step() between two, or "
            "let a torch optimizer step"
        )
    if exposure.exposed is None or (alone := exposure.of_operations(trace)) is None:
        raise ValueError(f"{folder}: the training thread of rank {about.rank} was not sampled; record it again")
    if not columns.completes.all():
        raise ValueError(
            f"{folder}: only the submission of some operations was recorded (nccl's run on devices), so the exposed "
            "communication is unknown; give the model by its dimensions, or as a module"
        )
    reductions = (columns.operation == "all_reduce") & ~columns.failed
    order = np.argsort(records["queued_ns"], kind="stable")
    gradients, rest = order[reductions[order]], order[~reductions[order]]

    def submitted(which: Integers, began: int, ended: int) -> Integers:
        first, end = np.searchsorted(records["queued_ns"][which], (began, ended))
        return which[first:end]

    found = []
    for began, ended in zip(trace.steps["began_ns"], trace.steps["ended_ns"], strict=True):
        mine, others = (submitted(which, began, ended) for which in (gradients, rest))
        queued = records["queued_ns"][mine]
        done = min(int(ended), int(records["finished_ns"][mine].max())) if len(mine) else int(ended)
        moments = np.array([*queued, done, ended], np.int64)
        # Everything but exposed communication counts as computing, including reading data and waiting for threads.
        since = exposure.between(exposure.exposed, np.full(len(moments), began), moments)
        spent = (moments - began) / 1e9 - since
        found.append(
            _Step(
                signature=tuple(
                    (about.name_of("dtype", records["dtype"][at]), int(columns.bytes[at]), str(columns.wire[at]))
                    for at in mine
                ),
                ready_s=spent[:-2],
                computed_s=float(spent[-2]),
                update_s=float(spent[-1] - spent[-2]),
                wall_s=float(ended - began) / 1e9,
                exposed_s=float(since[-1]),
                others_s=float(alone[others].sum()),
            )
        )
    return found


def _on_the_wire(dtype: str, wire: str) -> float:
    """The bytes on the wire per byte of a tensor."""
    if dtype != "f32":
        return 1.0
    return 0.5 if wire in HALVES else INTEGERS.get(wire, 1.0)


def _notes(recorded: int, alike: int, others_s: float, wall_s: float) -> list[str]:
    found = []
    if recorded > alike:
        found.append(
            f"{recorded - alike} of {recorded} steps had other all_reduces, or followed such steps, and are left out"
        )
    if others_s > _WORTH_A_NOTE * wall_s:
        found.append(
            f"{units.seconds(others_s)} of a step were operations other than all_reduce, and are not predicted"
        )
    return found


def _device(precision: str) -> Device:
    """The device of a profile, which shows only how long it computes. Its reduction rate is the built-in one."""
    unknown = float("nan")
    return Device(
        "the profile's device",
        {precision: unknown},
        memory_bytes=float("inf"),
        memory_bytes_per_s=float("inf"),
        copy_bytes_per_s=DEFAULT_LINKS.reduce_bytes_per_s,
    )


def _network(run: Run, name: str, device: Device) -> Cluster | str:
    groups = observe_groups(run)
    if not groups:
        return "no operation was recorded by all ranks of a group"
    if groups[0].topology.has_levels:
        return "several ranks share each host, and a profile does not separate their links"
    found = fit(groups[0], SMALL_BYTES)
    if not isinstance(found, Fitted):
        return found
    link = found.links.network
    tier = Tier("the profile's link", _MOST_HOSTS, link.latency_s, link.bytes_per_s)
    return Cluster(f"{name}'s own network", device, (tier,), (f"{name}, {found.text()}",))
