"""Models for `netfold plan` from a recipe of `netfold train`, from a torch module or from a profile.

netfold-train reads recipes and modules. It registers `recipe`, `recipe_names` and `module` in the entry points
netfold.models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from netfold.extras import plugin

if TYPE_CHECKING:
    from netfold_plan.cluster import Cluster, Device
    from netfold_plan.model import Model, Traced
    from netfold_plan.request.profile import ProfiledJob


@dataclass(frozen=True)
class Source:
    """The description of a job by a recipe, a module or a profile.

    job: keys by the sections of a job's file, for keys that neither the file nor an option has.
    device, network: of a profile only.
    """

    model: Model | None = None
    job: dict[str, Any] = field(default_factory=dict)
    device: Device | None = None
    network: Cluster | None = None


def find_source(
    tree: Mapping[str, Any],
    recipe: Path | None,
    settings: Sequence[str],
    module: str | None,
    inputs: Sequence[str],
    profile: Path | None,
) -> Source:
    """Read the model's source. tree: the job's file and options. Raises ValueError, a line for each problem."""
    job = tree.get("job", {})
    if not isinstance(job, Mapping):
        job = {}
    options = {"--recipe": recipe, "--module": module, "--profile": profile}
    several = [f"{option} {value}" for option, value in options.items() if value is not None]
    several += ["another one is named"] if several and "model" in tree else []
    if len(several) > 1:
        raise ValueError(f"{several[0]} has a model, and {several[1]}; leave one out")
    if settings and recipe is None:
        raise ValueError("--set changes a recipe; there is no --recipe")
    if inputs and module is None:
        raise ValueError("--input is for tracing a module; there is no --module")
    if recipe is not None:
        model, keys = plugin("netfold.models", "recipe", "--recipe", "train")(recipe, settings)
        # The recipe's split does not apply to another number of ranks.
        return Source(model, keys | ({"split": {}} if "gpus" in job else {}))
    if module is not None:
        # DDP overlaps the reduction of gradients with the backward pass.
        return Source(module_model(module, inputs), {"job": {"overlap": True}})
    if profile is not None:
        profiled, keys = _profile_model(profile, job, "cluster" in tree)
        network = None if isinstance(profiled.network, str) else profiled.network
        return Source(profiled.model, keys, profiled.device, network)
    return Source()


def module_model(spec: str, inputs: Sequence[str]) -> Traced:
    """The model of `package.module:factory`, traced with inputs of these shapes, by netfold-train.

    Raises ValueError, a line for each problem, if the module cannot be made or traced, or without netfold-train.
    """
    model: Traced = plugin("netfold.models", "module", "a module", "train")(spec, inputs)
    return model


def _profile_model(folder: Path, job: Mapping[str, Any], has_cluster: bool) -> tuple[ProfiledJob, dict[str, Any]]:
    """The profiled job, and keys of a job's file for it. job: the keys asked for; has_cluster: a cluster was named.

    A profile does not record samples. The model has as many samples as ranks, unless `job` has a batch. Each rank then
    trains on as many samples as a measured rank. Raises ValueError with one sentence.
    """
    from netfold_plan.request.profile import read_profile

    profiled = read_profile(folder)
    precision = profiled.precision
    if job.get("precision", precision) != precision:
        raise ValueError(f"{folder} was computed in {precision}; it does not tell how long {job['precision']} takes")
    gpus = job.get("gpus", profiled.model.ranks)
    batch = job.get("batch", gpus)
    if all(isinstance(each, int) and each > 0 for each in (gpus, batch)):
        if batch % gpus:
            raise ValueError(
                f"a batch of {batch} does not come out even over {gpus} devices; each has as many samples as a rank of "
                f"{folder} had"
            )
        profiled = profiled.of_samples(batch // gpus)
    if not has_cluster and isinstance(profiled.network, str):
        raise ValueError(f"{folder} does not show its network: {profiled.network}; name one with --cluster")
    fixed = {"gpus": gpus, "batch": batch, "precision": precision, "gradient_bytes": profiled.gradient_bytes}
    split = {"tensor": 1, "pipeline": 1, "zero": 0, "recompute": "none", "micro_batch": profiled.model.samples}
    return profiled, {"job": fixed | {"overlap": True}, "split": split}
