"""A result as text for a terminal. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from netfold import units
from netfold.page.escape import is_known
from netfold_plan.job import Job
from netfold_plan.model import Measured
from netfold_plan.result import Result, parts, reason
from netfold_plan.search import PredictedJob, describe_split
from netfold_plan.step import Prediction
from netfold_plan.training import Cost, Prices, training_cost
from netfold_plan.variants.compare import Variant
from netfold_plan.variants.hardware import AggregatorGain, Gain
from netfold_plan.variants.scaling_curve import ScalingPoint

# The longest bar of a step's parts, in characters.
_BAR = 24


def render_text(answer: Result) -> str:
    """The request, the step, memory, throughput; then other splits, curves, comparisons, and gains."""
    sections = [_asked(answer), _step(answer)]
    if is_known(answer.best.prediction.memory_bytes):
        sections.append(_memory(answer.best))
    sections.append(_together(answer))
    if answer.simulated is not None:
        sections.append(_simulated(answer.best.prediction, answer.simulated.prediction))
    if len(answer.best_few) > 1:
        sections.append(_few(answer))
    if len(answer.front) > 1:
        sections.append(_front(answer))
    sections += [_curve(scaling, points) for scaling, points in answer.curves.items()]
    sections += [_comparison(text, variants) for text, variants in answer.comparisons.items()]
    if answer.gains:
        sections.append(_gains(answer.gains))
    if answer.aggregator_gains:
        sections.append(
            "\n".join(["what one more aggregator would buy", *(f"  {each}" for each in describe_aggregators(answer))])
        )
    return "\n\n".join(sections)


def describe_request(answer: Result) -> str:
    """The model, the devices and the batch."""
    said, job = answer.request, answer.best.job
    # A measured model does not name its optimizer.
    how = job.precision if isinstance(said.model, Measured) else f"{job.precision}, {job.optimizer}"
    return (
        f"{said.model.name}, {units.big(said.model.parameters)} parameters, on {said.devices:,} x "
        f"{said.cluster.device.name} of {said.cluster.name}; a batch of {job.global_batch:,}, {how}"
    )


def describe_aggregators(answer: Result) -> list[str]:
    """A sentence for each possible aggregator."""
    named = sum(each.hosts for tier in answer.request.cluster.tiers for each in tier.aggregators)
    now = f"{named} aggregator{'s' if named > 1 else ''} now;" if named else "no aggregator:"
    return [f"{now} {_offer(each)}" for each in answer.aggregator_gains]


def _offer(offer: AggregatorGain) -> str:
    what = f"{offer.what} (c = {offer.c:g}, {offer.cores} core{'s' if offer.cores > 1 else ''})"
    if not offer.saves:
        return f"{what} would save nothing of a step of {time(offer.base_s)}"
    return f"{what} would save {units.ratio(offer.saved)}: {time(offer.step_s)} in place of {time(offer.base_s)}"


def time(seconds: float) -> str:
    """`137 s`, `12.3 ms`: always three digits, so that steps can be compared."""
    return f"{seconds:,.0f} s" if seconds >= 99.95 else f"{seconds:#.3g} s" if seconds >= 1 else units.seconds(seconds)


def table(title: str, rows: Sequence[Sequence[str]], left: Sequence[int] = ()) -> str:
    """A title with an indented table below it. left: as in `units.aligned`."""
    return "\n".join([title, *(f"  {line}" for line in units.aligned(rows, left))])


def rate(samples_per_s: float) -> str:
    return f"{samples_per_s:.3g}" if samples_per_s < 1000 else f"{samples_per_s:,.0f}"


def money(cost: Cost, prices: Prices) -> str:
    """`12,300 GPU hours, 24,600 EUR, at most 4,920 kWh`; unknown parts are left out."""
    said = [f"{_amount(cost.gpu_hours)} GPU hours"]
    if cost.money is not None:
        amount = _amount(cost.money)
        said.append(f"{amount} {prices.currency}" if prices.currency else f"costs {amount}")
    if cost.energy_kwh is not None:
        said.append(f"at most {_amount(cost.energy_kwh)} kWh for the devices")
    return ", ".join(said)


def _asked(answer: Result) -> str:
    lines = [describe_request(answer), f"split: {describe_split(answer.best.job)}"]
    if answer.tried > 1:
        lines.append(f"the fastest of {answer.fitting:,} that fit, of {answer.tried:,} splits")
    return "\n".join(lines)


def _step(answer: Result) -> str:
    found = answer.best.prediction
    rows = [["", "time", "share", ""]]
    for name, seconds in parts(found).items():
        share = seconds / found.step_s
        rows.append([name, time(seconds), units.ratio(share), "#" * round(_BAR * share)])
    title = (
        f"a step takes {time(found.step_s)}; about 80 of 100 measured ones lie between "
        f"{time(found.low_s)} and {time(found.high_s)}"
    )
    return table(title, rows, left=(0, 3))


def _memory(best: PredictedJob) -> str:
    memory = best.prediction.memory
    head = ["weights", "gradients", "optimizer", "activations", "together", "of"]
    kinds = (memory.weights, memory.gradients, memory.optimizer, memory.activations, memory.total)
    row = [*map(units.size, kinds), units.size(best.prediction.memory_bytes)]
    return table("memory of the rank that needs most", [head, row])


def _together(answer: Result) -> str:
    found, asked = answer.best.prediction, answer.request
    used = f"; model FLOP/s utilisation {units.ratio(found.mfu)}" if is_known(found.mfu) else ""
    lines = [
        f"{rate(found.samples_per_s)} samples per second, {rate(found.samples_per_s / asked.devices)} per device{used}",
    ]
    if answer.best.job.split.data > 1:
        lines.append(
            f"data-parallel efficiency {units.ratio(answer.efficiency)}: a device's throughput, against a replica alone"
        )
    lines.append(f"what limits it: {found.limit}")
    if answer.training_s is not None:
        assert answer.training_cost is not None
        epochs = asked.training.epochs_at(asked.job.global_batch)
        what = f"to the accuracy, {epochs:.3g} epochs" if epochs is not None else "the whole training"
        lines.append(f"{what}: {units.seconds(answer.training_s)}; {money(answer.training_cost, asked.prices)}")
    elif asked.training.epochs:
        low, high = asked.training.epochs[0][0], asked.training.epochs[-1][0]
        lines.append(
            f"time to accuracy: not known at a batch of {asked.job.global_batch:,}; training.epochs goes from "
            f"{low:,.0f} to {high:,.0f}"
        )
    elif answer.step_cost.money is not None:
        thousand = training_cost(1000 * found.step_s, asked.devices, asked.cluster, asked.prices)
        lines.append(f"1,000 steps: {money(thousand, asked.prices)}")
    if answer.failure_impact is not None:
        lines.append(failures(answer))
    return "\n".join([*lines, *(f"note: {note}" for note in answer.notes)])


def _simulated(closed: Prediction, events: Prediction) -> str:
    rows = [["", "closed form", "as events"]]
    here, there = parts(closed), parts(events)
    rows += [[name, *(time(each.get(name, 0.0)) for each in (here, there))] for name in {**here, **there}]
    rows.append(["together", time(closed.step_s), time(events.step_s)])
    lines = [table("the same step, simulated as events", rows, left=(0,))]
    if not closed.low_s <= events.step_s <= closed.high_s:
        lines.append(f"as events it takes {outside_the_range(closed, events)}")
    return "\n".join(lines)


def outside_the_range(closed: Prediction, events: Prediction) -> str:
    """The reason for a step as events outside of the range of the closed form."""
    return (
        f"{events.step_s / closed.step_s:.2f} times the closed form's time, outside of its range: events include waits "
        "that the closed form leaves out, and the range comes from errors of the closed form alone"
    )


def failures(answer: Result) -> str:
    """The effect of failures, as a sentence. The result must have a failure_impact."""
    assert answer.failure_impact is not None and answer.request.failures is not None
    goodput, between_s = answer.failure_impact.goodput, answer.request.failures.job_between_s
    said = f"with a failure every {units.seconds(between_s)}, "
    if goodput < 0.01:
        return said + "the job makes no progress; use fewer devices, or save faster"
    said += f"a checkpoint every {units.seconds(answer.failure_impact.interval_s)} is best: "
    said += f"{units.ratio(goodput)} of the time is progress"
    return said + (f", {units.seconds(answer.training_s / goodput)} in all" if answer.training_s is not None else "")


def _few(answer: Result) -> str:
    best = answer.best.prediction.step_s
    rows = [["step", "", "memory", "MFU", *_SPLIT, ""]]
    for choice in answer.best_few:
        found = choice.prediction
        more = found.step_s / best - 1
        rows.append(
            [
                time(found.step_s),
                f"+{100 * more:.1f}%" if more > 0 else "",
                units.size(found.memory.total),
                units.ratio(found.mfu),
                *_split(choice.job),
                reason(choice, answer.best),
            ]
        )
    return table("the best splits, the fastest of each mesh", rows, left=(-2, -1))


def _front(answer: Result) -> str:
    rows = [["memory", "step", *_SPLIT]]
    rows += [
        [units.size(each.prediction.memory.total), time(each.prediction.step_s), *_split(each.job)]
        for each in answer.front
    ]
    return table("less memory for more time (no split that fits is better in both)", rows, left=(-1,))


def _curve(scaling: str, points: Sequence[ScalingPoint]) -> str:
    what = "the batch stays" if scaling == "strong" else "the batch grows with the devices"
    what += "; efficiency is throughput a device, against the first row's"
    known = any(point.training_s is not None for point in points)
    rows = [["devices", "batch", "step", "samples/s", "efficiency", "MFU", *(["training"] if known else []), *_SPLIT]]
    notes = []
    for point in points:
        row = [f"{point.devices:,}", f"{point.batch:,}"]
        if point.choice is None:
            notes.append(f"  {point.devices:,}: {point.why}")
            rows.append([*row, *("-" for _ in rows[0][2:])])
            continue
        found = point.choice.prediction
        row += [time(found.step_s), rate(found.samples_per_s), units.ratio(point.efficiency)]
        row.append(units.ratio(found.mfu) if is_known(found.mfu) else "-")
        if known:
            row.append("-" if point.training_s is None else units.seconds(point.training_s))
        rows.append([*row, *_split(point.choice.job)])
    return "\n".join([table(f"{scaling} scaling: {what}", rows, left=(-1,)), *notes])


def _comparison(text: str, variants: Sequence[Variant]) -> str:
    rows = [["", "step", "", "exposed", *_SPLIT]]
    notes = []
    for each in variants:
        if each.choice is None:
            notes.append(f"  {each.name}: {each.why}")
            continue
        if each.assumed:
            notes.append(f"  {each.name}: {each.assumed}")
        found = each.choice.prediction
        exposed = sum(found.exposed_s.values()) / found.step_s
        rows.append(
            [each.name, time(found.step_s), units.times(each.factor), units.ratio(exposed), *_split(each.choice.job)]
        )
    return "\n".join([table(f"compared: {text}", rows, left=(0, -1)), *notes])


def _gains(gains: Sequence[Gain]) -> str:
    lines = [gain.sentence() for gain in gains if gain.buys]
    nothing = [gain.what for gain in gains if not gain.buys]
    lines += [f"{', '.join(nothing)}: nothing"] if nothing else []
    return "\n".join(["what more would buy", *(f"  {line}" for line in lines)])


_SPLIT = ("tensor", "pipeline", "data", "micro", "virtual", "ZeRO", "sequence", "recompute")


def _split(job: Job) -> list[str]:
    split = job.split
    numbers = (split.tensor, split.pipeline, split.data, job.micro_batch, split.interleave, split.zero)
    return [*(f"{number:,}" for number in numbers), "yes" if split.sequence else "no", job.recomputation]


def _amount(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
