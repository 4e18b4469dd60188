"""`netfold bench model`: replayed training steps of known models, as rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from netfold_lab.bench.backends import unique_labels
from netfold_lab.bench.config import BenchEnvironment, Replay, Replayed
from netfold_lab.bench.program import Program, build_program
from netfold_lab.bench.report import Ratio, describe_run, ratio_of, total_wrong
from netfold_lab.bench.runner import Runner, start_comparison
from netfold_lab.bench.spread import Spread, spread
from netfold_lab.rack.link import parse_link
from netfold_plan.model.catalogue import Model, find_model

__all__ = ["StepRow", "describe_network", "make_step_rows", "measure_models", "replay_models", "total_wrong"]
_RATES = (("gbit", 10**9), ("mbit", 10**6), ("kbit", 10**3))


@dataclass(frozen=True)
class StepRow:
    """One backend's steps of one model; times in ns."""

    model: str
    backend: str
    workers: int
    batch: int
    parameters: int  # the model's own, before `shrink`
    gradient_bytes: int  # likewise
    buckets: int  # all_reduces a step
    compute_ns: int  # the step where transfers take no time
    alone_ns: int | None  # the same, measured
    times_ns: list[int]  # of each step, the slowest rank's
    step_ns: Spread | None
    exposed_ns: Spread | None  # of step_ns, the part beyond compute_ns
    efficiency: Spread | None  # compute_ns / step_ns
    samples_per_s: float | None  # of all ranks together
    late_ns: Spread | None  # of the accelerators' timer
    wrong: int | None
    ratio: Ratio | None
    refused: str | None  # the backend's own sentence; no times then


def replay_models(place: BenchEnvironment, replay: Replay) -> tuple[list[StepRow], dict[str, Any]]:
    """Run from start to end; return rows, and everything for JSON. Raises BenchError, ValueError, RackError."""
    with start_comparison(place, replay.backends) as runner:
        rows = measure_models(runner, replay)
        stands_for = describe_network(place, replay)
        return rows, describe_run(runner.describe(), replay, rows, stands_for=stands_for)


def measure_models(runner: Runner, replay: Replay) -> list[StepRow]:
    """Return a row for each model and backend, in the replay's order. The backends of a model are interleaved by round.

    The runner's worlds must include those of all backends. A step takes the model's computing time and the transfer
    time that is not hidden behind it. Each backend plays rounds + warmups + 4 steps a model. Raises BenchError.
    """
    return [
        row
        for model in replay.models
        for row in make_step_rows(runner.place, replay, model, runner.measure_step(replay, model))
    ]


def make_step_rows(place: BenchEnvironment, replay: Replay, model: str, replayed: Sequence[Replayed]) -> list[StepRow]:
    """Return one model's row for each backend. Pure."""
    known = find_model(model)
    program = build_program(known, **replay.scales())
    return [_row(place, replay, known, program, replayed, index) for index in range(len(replayed))]


def describe_network(place: BenchEnvironment, replay: Replay) -> str:
    """Return a sentence on the network and the accelerators that the run stands for."""
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
    """Return the rate in tc's form."""
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
        backend=unique_labels(replay.backends)[index],
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
        ratio=ratio_of(replay.backends, [one.steps.times_ns for one in replayed], index),
        refused=mine.steps.refused,
    )
