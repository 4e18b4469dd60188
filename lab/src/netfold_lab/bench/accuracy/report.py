"""The tables of the accuracy benchmark. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from netfold_lab.bench.accuracy.formats import FIXED, FORMATS
from netfold_lab.bench.accuracy.settings import TASKS, Settings
from netfold_lab.bench.accuracy.tensors import KINDS
from netfold_lab.bench.table import markdown

Training = Mapping[str, Any]
COMMAND = "netfold bench accuracy"


def render(settings: Settings, found: Mapping[str, Any], machine: str) -> str:
    ranks, trainings = settings.ranks, [*found["trainings"], *found["sweep"]]
    sections = [
        "# What each wire format keeps",
        f"`{COMMAND}`: {ranks} ranks, processes on one machine; every sum goes through one software switch. f32, "
        "bf16, f16, i32 and i8 are the backend's own formats. SwitchML's two are i32 sums through the same switch; "
        "one factor, found by profiling, turns floats into integers. For its f16, the worker makes the conversions of "
        "SwitchML's switch, with the same arithmetic. "
        "[docs/explanation/numbers.md](../../../docs/explanation/numbers.md#measured) explains the tables.",
        "## Sums against f64",
        f"{settings.elements} elements per rank. In each field: the greatest error over the greatest exact sum; the "
        "root mean square of the errors over that of the exact sums; the part of the elements whose error is half of "
        "their value or more. SwitchML's factor is found from the same tensor. *mixed*: every element has a magnitude "
        "of its own; *by layer*: 4096 consecutive elements share one; *outlier*: one of 1e9 among normal values; "
        "*tiny*: around 1e-38, half of them subnormal.",
        _errors(found["errors"]),
        "Sums of values on one or two ranks, among ones, where a value or the sum is not finite; the ones' sum is "
        f"{ranks}. SwitchML's factor was found from ones alone.",
        _specials(found["specials"]),
        "## Training",
        f"DDP, {ranks} ranks, {settings.steps} steps, seeds {', '.join(map(str, settings.seeds))}; loss (cross "
        "entropy, in nats) and accuracy on unseen data. "
        f"*images*: a ResNet of {found['parameters']['images']} parameters, SGD with momentum, ten kinds of drawn "
        f"pictures. *text*: a transformer of {found['parameters']['text']} parameters, Adam, the Python "
        "manual letter by letter. Means, and the least and the greatest in brackets.",
        _trainings(found["trainings"]),
        "## SwitchML's factor",
        f"The images again, by its 32-bit fixed point, seeds {', '.join(map(str, settings.sweep_seeds))}; the factor "
        "as a multiple of the profiled one.",
        _sweep(found["sweep"]),
        _agreement(trainings),
        f"{found['seconds']:.0f} s in all; {machine}",
    ]
    return "\n\n".join(sections) + "\n"


def _errors(errors: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    rows = [
        [
            form,
            *(
                f"{e['greatest']:.0e}; {e['rms']:.0e}; {_part(e['gone'])}"
                for e in (errors[form][kind] for kind in KINDS)
            ),
        ]
        for form in errors
    ]
    return _table(["", *KINDS], rows)


def _specials(specials: Mapping[str, Mapping[str, str]]) -> str:
    names = list(next(iter(specials.values())))
    return _table(["", *names], [[form, *(specials[form][name] for name in names)] for form in specials])


def _trainings(trainings: Sequence[Training]) -> str:
    def of(form: str, task: str) -> list[Training]:
        return [each for each in trainings if each["format"] == form and each["task"] == task]

    rows = [
        [
            form,
            _range(of(form, "images"), "accuracy"),
            *(_range(of(form, task), "loss") for task in TASKS),
            _over(of(form, "text"), of("f32", "text")),
        ]
        for form in FORMATS
    ]
    header = ["", "images: accuracy", *(f"{task}: loss" for task in TASKS), "text: loss over f32's, seed by seed"]
    return _table(header, rows)


def _sweep(sweep: Sequence[Training]) -> str:
    powers = sorted({each["power"] for each in sweep})
    rows = []
    for power in powers:
        of = [each for each in sweep if each["power"] == power]
        rows.append([f"2^{power}" if power else "1", _range(of, "accuracy"), _range(of, "loss")])
    return _table([f"{FIXED}, factor", "accuracy", "loss"], rows)


def _agreement(trainings: Sequence[Training]) -> str:
    apart = [f"{each['task']} by {each['format']}, seed {each['seed']}" for each in trainings if not each["agree"]]
    if not apart:
        return f"After each of the {len(trainings)} trainings all ranks had the same bits in every parameter."
    return f"**Ranks ended with different parameters**: {'; '.join(apart)}."


def _range(trainings: Sequence[Training], what: str) -> str:
    """Return mean, least and greatest. A training that ended in NaN has no loss, and guesses."""
    values = [each[what] for each in trainings]
    known = sorted(value for value in values if value is not None)
    lost = "" if len(known) == len(values) else f"{len(values) - len(known)} of {len(values)} diverged"
    if not known:
        return lost
    text = f"{sum(known) / len(known):.3f}"
    if len(known) > 1:
        text += f" ({known[0]:.3f} .. {known[-1]:.3f})"
    return f"{text}; {lost}" if lost else text


def _over(trainings: Sequence[Training], others: Sequence[Training]) -> str:
    """Return the differences of two formats' losses with the same seeds."""
    pairs = [(one["loss"], other["loss"]) for one, other in zip(trainings, others, strict=True)]
    known = sorted(one - other for one, other in pairs if one is not None and other is not None)
    return f"{sum(known) / len(known):+.4f} ({known[0]:+.4f} .. {known[-1]:+.4f})" if known else "diverged"


def _part(value: float) -> str:
    return "0" if value == 0 else f"{value:.1%}" if value >= 0.001 else f"{value:.0e}"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(markdown(header, rows))
