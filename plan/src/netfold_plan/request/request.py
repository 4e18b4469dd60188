"""A request to the planner, checked: known keys, values of their kind, and every problem with its place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from netfold.quantity import parse_quantity
from netfold_plan.cluster import Cluster, Device, cluster_of, load_cluster
from netfold_plan.failures import Failures
from netfold_plan.job import OPTIMIZERS, PRECISIONS, RECOMPUTATIONS, SCHEDULES, WIRES, Job
from netfold_plan.model import Model
from netfold_plan.model.registry import find_model, model_of
from netfold_plan.request.key_lines import Key, key_lines, line_of
from netfold_plan.search import Space
from netfold_plan.toml_file import read_toml
from netfold_plan.training import Prices, TrainingLength
from netfold_plan.words import suggest


class RequestError(ValueError):
    """One line per problem: the place, the key, what is wrong, and what to do."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


@dataclass(frozen=True)
class Request:
    """job: without the split, the microbatch and the recomputation, which `space` fixes or leaves free."""

    model: Model
    cluster: Cluster
    devices: int
    job: Job
    space: Space = field(default_factory=Space)
    prices: Prices = field(default_factory=Prices)
    training: TrainingLength = field(default_factory=TrainingLength)
    failures: Failures | None = None


def read_job(path: Path) -> tuple[dict[str, Any], Mapping[Key, str]]:
    """The keys of a job's file (TOML), and the place of each key: "job.toml:12". Raises ValueError, in one sentence."""
    tree, text = read_toml(path)
    return tree, {key: f"{path}:{line}" for key, line in key_lines(text).items()}


def parse_request(
    tree: Mapping[str, Any],
    where: Mapping[Key, str],
    *,
    model: Model | None = None,
    device: Device | None = None,
    network: Cluster | None = None,
) -> Request:
    """Check the keys of a job's file or of options. Raises RequestError with all problems.

    where: the place of each key.
    model: in place of a model's name. device: on which `model` was measured, in place of the cluster's own device.
    network: the cluster where the request names none.
    """
    reader = _Reader(tree, where)
    reader.check((), (*_SECTIONS, "model", "cluster"))
    for section, keys in _SECTIONS.items():
        reader.check((section,), keys)
    found = model if model is not None else reader.attempt(("model",), lambda: _model(tree.get("model")))
    cluster = reader.attempt(("cluster",), lambda: _cluster(tree.get("cluster"), device, network))
    job, split, price = (reader.section(name) for name in ("job", "split", "price"))
    for key, option, name in (("gpus", "--ranks", "devices to train on"), ("batch", "--batch", "samples of a step")):
        if key not in job and not reader.wrong & {("job",), ("job", key)}:
            reader.problem(("job", key), f"{option} is missing: {name} ({key} under [job] in a file)")
    training = reader.attempt(("training",), lambda: _training(reader.section("training")))
    reader.finish()
    assert found is not None and cluster is not None and training is not None
    if "in_network" not in job:
        job["in_network"] = cluster.aggregates
    elif job["in_network"] and not cluster.aggregates:
        reader.problem(
            ("job", "in_network"),
            f"in_network is true, and nothing in {cluster.name} aggregates; give one of its tiers an aggregator "
            "([[tier.aggregator]]), or use --compare network=aggregator",
        )
    if "precision" not in job:
        job["precision"] = next(each for each in _PRECISIONS if each in cluster.device.flops)
    devices = job.pop("gpus")
    if "bucket" in job:
        job["bucket_bytes"] = reader.attempt(("job", "bucket"), lambda: _bucket_bytes(job.pop("bucket")))
    space = Space(**{"recomputation" if key == "recompute" else key: value for key, value in split.items()})
    made = reader.attempt(("job",), lambda: Job(global_batch=job.pop("batch"), **job))
    reader.attempt(("job", "precision"), lambda: cluster.device.peak(made.precision if made else "bf16"))
    if devices > cluster.devices:
        reader.problem(("job", "gpus"), f"gpus is {devices}, and {cluster.name} has {cluster.devices}; use fewer")
    reader.finish()
    assert made is not None
    prices = Prices(price.get("gpu_hour", cluster.price_an_hour), price.get("kwh", 0.0), price.get("currency", ""))
    failures = reader.attempt(("failures",), lambda: _failures(reader.section("failures"), devices))
    reader.finish()
    return Request(found, cluster, devices, made, space, prices, training, failures)


# The precision of a job that does not name one: the first that the device has.
_PRECISIONS = ("bf16", "f16", "tf32", "f32")

# A check returns what the value must be, or an empty string for a good value.
_Check = Callable[[Any], str]


def _whole(value: Any) -> str:
    fits = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    return "" if fits else "a whole number, at least 1"


def _number(value: Any) -> str:
    fits = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < float("inf")
    return "" if fits else "a number, more than 0"


def _is_a(kind: type, must: str) -> _Check:
    return lambda value: "" if isinstance(value, kind) else must


_truth, _text, _table = _is_a(bool, "true or false"), _is_a(str, "text, in quotes"), _is_a(Mapping, "a table")


def _one_of(*words: Any) -> _Check:
    def check(value: Any) -> str:
        if value in words and not isinstance(value, bool):
            return ""
        hint = suggest(value, words) if isinstance(value, str) else ""
        return f"one of {', '.join(map(str, words))}{f'; {hint}' if hint.startswith('did') else ''}"

    return check


_SECTIONS: dict[str, dict[str, _Check]] = {
    "job": {
        "gpus": _whole,
        "batch": _whole,
        "precision": _one_of(*PRECISIONS),
        "optimizer": _one_of(*OPTIMIZERS),
        # split.interleave chooses interleaving.
        "schedule": _one_of(*(each for each in SCHEDULES if each != "interleaved")),
        "overlap": _truth,
        "scattered": _truth,
        "prefetch": _truth,
        "in_network": _truth,
        "bucket": _text,
        "gradient_bytes": _one_of(2, 4),
        "wire": _one_of(*WIRES),
    },
    "split": {
        "tensor": _whole,
        "pipeline": _whole,
        "data": _whole,
        "micro_batch": _whole,
        "interleave": _whole,
        "sequence": _truth,
        "zero": _one_of(0, 1, 2, 3),
        "recompute": _one_of(*RECOMPUTATIONS),
    },
    "price": {"gpu_hour": _number, "kwh": _number, "currency": _text},
    "failures": {"hours_between": _number, "checkpoint": _text, "restart": _text},
    "training": {"samples": _number, "dataset": _number, "epochs": _table},
}


class _Reader:
    """The tree of a request, and the problems found so far. wrong: their keys."""

    def __init__(self, tree: Mapping[str, Any], where: Mapping[Key, str]) -> None:
        self.tree, self._where = tree, where
        self._problems: list[str] = []
        self.wrong: set[Key] = set()

    def problem(self, key: Key, sentence: str) -> None:
        self.wrong.add(key)
        place = line_of(key, self._where)
        self._problems.append(f"{place}: {sentence}" if place else sentence)

    def attempt(self, key: Key, make: Callable[[], Any]) -> Any:
        """The result of `make`; None where it raises ValueError, which becomes a problem of the key."""
        try:
            return make()
        except ValueError as error:
            if key not in self.wrong:
                self.problem(key, str(error))
            return None

    def check(self, section: Key, keys: Any) -> None:
        """Report unknown keys, and values of a wrong kind."""
        table: Any = self.tree
        for part in section:
            table = table.get(part, {})
        if not isinstance(table, Mapping):
            self.problem(section, f"{'.'.join(section)} is {table!r}; it must be a table")
            return
        for key, value in table.items():
            name = ".".join((*section, key))
            if key not in keys:
                self.problem((*section, key), f"{name} is not known; {suggest(key, keys)}")
            elif isinstance(keys, Mapping) and (must := keys[key](value)):
                self.problem((*section, key), f"{name} is {_shown(value)}; it must be {must}")

    def section(self, name: str) -> dict[str, Any]:
        """The keys without problems."""
        table = self.tree.get(name, {})
        if not isinstance(table, Mapping):
            return {}
        return {key: value for key, value in table.items() if (name, key) not in self.wrong}

    def finish(self) -> None:
        """Raise RequestError if there are problems."""
        if self._problems:
            raise RequestError(self._problems)


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else "a table" if isinstance(value, Mapping) else repr(value)


def _model(given: Any) -> Model:
    if given is None:
        raise ValueError("--model is missing: a name of `netfold plan models`, or gpt:hidden=..,layers=..,heads=..")
    if isinstance(given, str):
        return find_model(given)
    if not isinstance(given, Mapping) or not isinstance(given.get("name"), str):
        raise ValueError('model must be text, or a table with a name: name = "gpt"')
    return model_of(given["name"], {key: value for key, value in given.items() if key != "name"})


def _cluster(given: Any, device: Device | None, network: Cluster | None) -> Cluster:
    if given is None and network is not None:
        return network
    if given is None:
        raise ValueError("--cluster is missing: a name of `netfold plan clusters`, or a file's path (.toml)")
    if isinstance(given, str):
        found = load_cluster(given, device)
    elif isinstance(given, Mapping):
        found = cluster_of(dict(given), "of this file")
    else:
        raise ValueError("cluster must be text, or a table with a device and its tiers")
    return found if device is None else replace(found, device=device)


def _bucket_bytes(given: str) -> float:
    found = parse_quantity(given, "bytes", "job.bucket")
    if found < 1:
        raise ValueError(f'job.bucket is {given!r}, which holds nothing; write for example "25 MiB"')
    return found


def _training(given: Mapping[str, Any]) -> TrainingLength:
    curve: list[tuple[float, float]] = []
    for batch, epochs in given.get("epochs", {}).items():
        if not batch.isdecimal() or int(batch) < 1 or _number(epochs):
            raise ValueError(
                f"training.epochs: {batch} = {epochs!r} must be samples of a step and epochs, such as 256 = 38"
            )
        curve.append((float(batch), float(epochs)))
    return TrainingLength(**dict(given) | {"epochs": tuple(sorted(curve))})


def _failures(given: Mapping[str, Any], devices: int) -> Failures | None:
    if not given:
        return None
    for key in ("hours_between", "checkpoint", "restart"):
        if key not in given:
            raise ValueError(
                f"failures.{key} is missing; hours_between is of one device, checkpoint and restart are times"
            )
    checkpoint, restart = (parse_quantity(given[key], "time", f"failures.{key}") for key in ("checkpoint", "restart"))
    return Failures(3600.0 * given["hours_between"], devices, checkpoint, restart)
