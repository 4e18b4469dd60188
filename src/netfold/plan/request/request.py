"""What somebody asks of the planner, checked: keys known, values of their kind, each problem with its place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from netfold.plan.cluster import Cluster, Device, cluster_of, load_cluster
from netfold.plan.cost_of_training import Prices
from netfold.plan.failures import Failures
from netfold.plan.job import OPTIMIZERS, PRECISIONS, RECOMPUTATIONS, SCHEDULES, WIRES, Job
from netfold.plan.model import Model
from netfold.plan.model.registry import find_model, model_of
from netfold.plan.quantity import parse_quantity
from netfold.plan.request.key_lines import Key
from netfold.plan.search import Space
from netfold.plan.training_length import TrainingLength
from netfold.plan.words import suggest


class RequestError(ValueError):
    """One line a problem: where, which key, what is wrong, what to do."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


@dataclass(frozen=True)
class Request:
    """job: all of it but the split, the microbatch and the recomputation, which `space` fixes or leaves free."""

    model: Model
    cluster: Cluster
    devices: int
    job: Job
    space: Space = field(default_factory=Space)
    prices: Prices = field(default_factory=Prices)
    training: TrainingLength = field(default_factory=TrainingLength)
    failures: Failures | None = None


def parse_request(
    tree: Mapping[str, Any],
    where: Mapping[Key, str],
    *,
    model: Model | None = None,
    device: Device | None = None,
    network: Cluster | None = None,
) -> Request:
    """tree: as a job's file has it. where: the place of each key. model: one that is there already, instead of a name.
    device: that it was measured on, in place of the cluster's own; network: where no cluster is named. Raises
    RequestError with all that is wrong.
    """
    asking = _Asking(tree, where)
    asking.known((), (*_SECTIONS, "model", "cluster"))
    for section, keys in _SECTIONS.items():
        asking.known((section,), keys)
    found = model if model is not None else asking.tried(("model",), lambda: _model(asking))
    cluster = asking.tried(("cluster",), lambda: _cluster(asking, device, network))
    job, split, price = (asking.section(name) for name in ("job", "split", "price"))
    for key, name in (("gpus", "devices to train on"), ("batch", "samples of a step")):
        if key not in job and not asking.wrong & {("job",), ("job", key)}:
            asking.problem(("job", key), f"{key} is missing: {name}")
    training = asking.tried(("training",), lambda: _training(asking.section("training")))
    asking.end()
    assert found is not None and cluster is not None and training is not None
    if "in_network" not in job:
        job["in_network"] = cluster.aggregates
    elif job["in_network"] and not cluster.aggregates:
        asking.problem(
            ("job", "in_network"),
            f"in_network is true, and nothing in {cluster.name} adds up what ranks send; name an aggregator of "
            "one of its tiers ([[tier.aggregator]], docs/reference/plan/cluster.md),"
            " or try --compare network=aggregator",
        )
    if "precision" not in job:
        job["precision"] = next(each for each in _PRECISIONS if each in cluster.device.flops)
    devices = job.pop("gpus")
    if "bucket" in job:
        job["bucket_bytes"] = asking.tried(("job", "bucket"), lambda: _bucket_bytes(job.pop("bucket")))
    space = Space(**{_SPACE.get(key, key): value for key, value in split.items()})
    made = asking.tried(("job",), lambda: Job(global_batch=job.pop("batch"), **job))
    asking.tried(("job", "precision"), lambda: cluster.device.peak(made.precision if made else "bf16"))
    if devices > cluster.devices:
        asking.problem(
            ("job", "gpus"), f"gpus is {devices}, and {cluster.name} has {cluster.devices}; take fewer, or more of them"
        )
    asking.end()
    assert made is not None
    prices = Prices(price.get("gpu_hour", cluster.price_an_hour), price.get("kwh", 0.0), price.get("currency", ""))
    failures = asking.tried(("failures",), lambda: _failures(asking.section("failures"), devices))
    asking.end()
    return Request(found, cluster, devices, made, space, prices, training, failures)


# What a job is computed in where it does not say: the first that a device has.
_PRECISIONS = ("bf16", "f16", "tf32", "f32")

# A check returns what a value must be, where it is not.
_Check = Callable[[Any], str]


def _whole(least: int) -> _Check:
    def check(value: Any) -> str:
        fits = isinstance(value, int) and not isinstance(value, bool) and value >= least
        return "" if fits else f"a whole number, at least {least}"

    return check


def _number(value: Any) -> str:
    fits = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < float("inf")
    return "" if fits else "a number, more than 0"


def _truth(value: Any) -> str:
    return "" if isinstance(value, bool) else "true or false"


def _text(value: Any) -> str:
    return "" if isinstance(value, str) else "text, in quotes"


def _table(value: Any) -> str:
    return "" if isinstance(value, Mapping) else "a table"


def _one_of(*words: Any) -> _Check:
    def check(value: Any) -> str:
        if value in words and not isinstance(value, bool):
            return ""
        hint = suggest(value, words) if isinstance(value, str) else ""
        return f"one of {', '.join(map(str, words))}{f'; {hint}' if hint.startswith('did') else ''}"

    return check


# Interleaving is said by split.interleave.
_SCHEDULES = tuple(each for each in SCHEDULES if each != "interleaved")
_SECTIONS: dict[str, dict[str, _Check]] = {
    "job": {
        "gpus": _whole(1),
        "batch": _whole(1),
        "precision": _one_of(*PRECISIONS),
        "optimizer": _one_of(*OPTIMIZERS),
        "schedule": _one_of(*_SCHEDULES),
        "overlap": _truth,
        "scattered": _truth,
        "prefetch": _truth,
        "in_network": _truth,
        "bucket": _text,
        "gradient_bytes": _one_of(2, 4),
        "wire": _one_of(*WIRES),
    },
    "split": {
        "tensor": _whole(1),
        "pipeline": _whole(1),
        "data": _whole(1),
        "micro_batch": _whole(1),
        "interleave": _whole(1),
        "sequence": _truth,
        "zero": _one_of(0, 1, 2, 3),
        "recompute": _one_of(*RECOMPUTATIONS),
    },
    "price": {"gpu_hour": _number, "kwh": _number, "currency": _text},
    "failures": {"hours_between": _number, "checkpoint": _text, "restart": _text},
    "training": {"samples": _number, "dataset": _number, "epochs": _table},
}
_SPACE = {"recompute": "recomputation"}


class _Asking:
    """A tree on its way to a question, and what was found wrong with it."""

    def __init__(self, tree: Mapping[str, Any], where: Mapping[Key, str]) -> None:
        self.tree, self._where = tree, where
        self._problems: list[str] = []
        self.wrong: set[Key] = set()

    def problem(self, key: Key, sentence: str) -> None:
        self.wrong.add(key)
        place = next((self._where[key[:end]] for end in range(len(key), 0, -1) if key[:end] in self._where), "")
        self._problems.append(f"{place}: {sentence}" if place else sentence)

    def tried(self, key: Key, make: Callable[[], Any]) -> Any:
        """What `make` makes; None, and its sentence kept, where it raises."""
        try:
            return make()
        except ValueError as error:
            if key not in self.wrong:
                self.problem(key, str(error))
            return None

    def known(self, section: Key, keys: Any) -> None:
        """Complain of keys that there are not, and of values of another kind."""
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
        """Its keys that are right."""
        table = self.tree.get(name, {})
        if not isinstance(table, Mapping):
            return {}
        return {key: value for key, value in table.items() if (name, key) not in self.wrong}

    def end(self) -> None:
        if self._problems:
            raise RequestError(self._problems)


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else "a table" if isinstance(value, Mapping) else repr(value)


def _model(asking: _Asking) -> Model:
    said = asking.tree.get("model")
    if said is None:
        raise ValueError("the model is missing: a name of `netfold plan models`, or gpt:hidden=..,layers=..,heads=..")
    if isinstance(said, str):
        return find_model(said)
    if not isinstance(said, Mapping) or not isinstance(said.get("name"), str):
        raise ValueError('model is text, or a table with a name: name = "gpt"')
    return model_of(said["name"], {key: value for key, value in said.items() if key != "name"})


def _cluster(asking: _Asking, device: Device | None, network: Cluster | None) -> Cluster:
    said = asking.tree.get("cluster")
    if said is None and network is not None:
        return network
    found = _said_cluster(said, device)
    return found if device is None else replace(found, device=device)


def _said_cluster(said: Any, device: Device | None) -> Cluster:
    if said is None:
        raise ValueError("the cluster is missing: a name of `netfold plan clusters`, or a file's path (.toml)")
    if isinstance(said, str):
        return load_cluster(said, device)
    if not isinstance(said, Mapping):
        raise ValueError("cluster is text, or a table with a device and its tiers")
    return cluster_of(dict(said), "of this file")


def _bucket_bytes(said: str) -> float:
    found = parse_quantity(said, "bytes", "job.bucket")
    if found < 1:
        raise ValueError(f'job.bucket is {said!r}, which holds nothing; such as "25 MiB"')
    return found


def _training(said: Mapping[str, Any]) -> TrainingLength:
    curve: list[tuple[float, float]] = []
    for batch, epochs in said.get("epochs", {}).items():
        if not batch.isdecimal() or int(batch) < 1 or _number(epochs):
            raise ValueError(
                f"training.epochs: {batch} = {epochs!r} is no point of a curve; write samples of a step = epochs, such "
                "as 256 = 38"
            )
        curve.append((float(batch), float(epochs)))
    return TrainingLength(**dict(said) | {"epochs": tuple(sorted(curve))})


def _failures(said: Mapping[str, Any], devices: int) -> Failures | None:
    if not said:
        return None
    for key in ("hours_between", "checkpoint", "restart"):
        if key not in said:
            raise ValueError(
                f"failures.{key} is missing; hours_between is of one device, checkpoint and restart take a time"
            )
    checkpoint, restart = (parse_quantity(said[key], "time", f"failures.{key}") for key in ("checkpoint", "restart"))
    return Failures(3600.0 * said["hours_between"], devices, checkpoint, restart)
