"""`netfold bench model`: training steps of known models, replayed, as rows. `measure_models` is the way in."""

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from netfold.bench.config import BenchEnvironment, Replay, Replayed
from netfold.bench.program import Program, build_program
from netfold.bench.report import Ratio
from netfold.bench.runner import Runner, start_runner
from netfold.bench.spread import Spread, paired_ratios, spread
from netfold.plan.model.catalogue import Model, find_model
from netfold.rack.link import parse_link

_RATES = (("gbit", 10**9), ("mbit", 10**6), ("kbit", 10**3))


@dataclass(frozen=True)
class StepRow:
    """One backend's steps of one model; times in ns.

    parameters, gradient_bytes: the model's own, before `shrink`; buckets: all_reduces a step; compute_ns: the step
    where transfers take no time; alone_ns: that, measured; step_ns: the slowest rank's; exposed_ns: what of it
    was more than computing; efficiency: compute_ns / step_ns; samples_per_s: of all ranks together; late_ns: of the
    accelerators' timer; ratio: the peer's time over ours, round by round; refused: the own sentence, no times then.
    """

    model: str
    backend: str
    workers: int
    batch: int
    parameters: int
    gradient_bytes: int
    buckets: int
    compute_ns: int
    alone_ns: int | None
    times_ns: list[int]
    step_ns: Spread | None
    exposed_ns: Spread | None
    efficiency: Spread | None
    samples_per_s: float | None
    late_ns: Spread | None
    wrong: int | None
    ratio: Ratio | None
    refused: str | None


def replay_models(place: BenchEnvironment, replay: Replay) -> tuple[list[StepRow], dict[str, Any]]:
    """A run from start to end: rows, and everything about it for JSON. Raises BenchError, ValueError, RackError."""
    names = replay.backend_names()
    if not any(name.is_netfold for name in names):
        place = replace(place, switch=False)
    with start_runner(place, [name.world for name in names]) as runner:
        rows = measure_models(runner, replay)
        return rows, {
            "command": sys.argv,
            **runner.describe(),
            "config": replay.to_json(),
            "stands_for": describe_network(place, replay),
            "rows": [asdict(row) for row in rows],
        }


def measure_models(runner: Runner, replay: Replay) -> list[StepRow]:
    """A row a model and backend, in the replay's order; within a model the backends are interleaved round by round.

    The runner's worlds must hold those of all backends. A step takes as long as the model's computing and what is not
    hidden behind it; rounds + warmups + 4 of them are played a backend and model. Raises BenchError.
    """
    rows = []
    for model in replay.models:
        rows += make_step_rows(runner.place, replay, model, runner.measure_step(replay, model))
    return rows


def make_step_rows(place: BenchEnvironment, replay: Replay, model: str, replayed: Sequence[Replayed]) -> list[StepRow]:
    """What one model's backends did, a row each. Pure."""
    program = build_program(
        find_model(model), bucket_bytes=replay.bucket_bytes, shrink=replay.shrink, compute_scale=replay.compute_scale
    )
    return [_row(place, replay, find_model(model), program, replayed, index) for index in range(len(replayed))]


def total_wrong(rows: Sequence[StepRow]) -> int:
    return sum(row.wrong or 0 for row in rows)


def describe_network(place: BenchEnvironment, replay: Replay) -> str:
    """Which network and accelerators the run stands for, in a sentence."""
    tensors = "tensors as they are" if replay.shrink == 1 else f"tensors 1/{replay.shrink} of their size"
    fast = "" if replay.compute_scale == 1 else f"; accelerators {replay.compute_scale:g} times as fast as published"
    if place.rack_rate is None:
        return f"{place.workers} ranks on this machine, {tensors}{fast}"
    rate_bits = parse_link(place.rack_rate).rate_bits * replay.shrink
    if replay.compute_scale != 1:
        fast += f", for which published ones would have links of {_format_rate(rate_bits / replay.compute_scale)}"
    if replay.shrink == 1:
        return f"{place.workers} hosts, links of {place.rack_rate}, {tensors}{fast}"
    return (
        f"stands for {place.workers} hosts with links of {_format_rate(rate_bits)}: {tensors}, "
        f"rack links of {place.rack_rate}{fast}"
    )


def _format_rate(rate_bits: float) -> str:
    """As tc writes it."""
    unit, size = next(((unit, size) for unit, size in _RATES if rate_bits >= size), _RATES[-1])
    return f"{rate_bits / size:g}{unit}"


def _row(
    place: BenchEnvironment, replay: Replay, model: Model, program: Program, replayed: Sequence[Replayed], index: int
) -> StepRow:
    mine = replayed[index]
    times_ns = mine.steps.times_ns
    step_ns = spread(times_ns) if times_ns else None
    compute_ns = program.compute_ns
    return StepRow(
        model=model.name,
        backend=replay.labels()[index],
        workers=place.workers,
        batch=model.speed.batch,
        parameters=model.parameters,
        gradient_bytes=model.gradient_bytes,
        buckets=sum(transfer.collective == "all_reduce" for transfer in program.transfers),
        compute_ns=compute_ns,
        alone_ns=mine.alone_ns,
        times_ns=times_ns,
        step_ns=step_ns,
        exposed_ns=spread([step - compute_ns for step in times_ns]) if times_ns else None,
        efficiency=spread([compute_ns / step for step in times_ns]) if times_ns else None,
        samples_per_s=None if step_ns is None else place.workers * model.speed.batch / step_ns.median * 1e9,
        late_ns=spread(mine.late_ns) if mine.late_ns else None,
        wrong=mine.steps.wrong,
        ratio=_ratio(replay, replayed, index),
        refused=mine.steps.refused,
    )


def _ratio(replay: Replay, replayed: Sequence[Replayed], index: int) -> Ratio | None:
    """To the first backend, or of the first to the second."""
    if len(replayed) < 2:
        return None
    peer = 1 if index == 0 else 0
    ours, theirs = replayed[index].steps.times_ns, replayed[peer].steps.times_ns
    if not ours or not theirs:
        return None
    ratios = paired_ratios(theirs, ours)
    return Ratio(replay.labels()[peer], ratios, spread(ratios))
