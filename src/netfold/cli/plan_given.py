"""What `netfold plan` may be given in place of a model's name: a recipe, a torch module, a profile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from netfold.plan.cluster import Cluster, Device
    from netfold.plan.model import Model


@dataclass(frozen=True)
class Given:
    """says: of a job, by the sections of its file, where nothing else is said. device, network: a profile's."""

    model: Model | None = None
    says: dict[str, Any] = field(default_factory=dict)
    device: Device | None = None
    network: Cluster | None = None


def given_model(
    tree: Mapping[str, Any],
    recipe: Path | None,
    settings: Sequence[str],
    module: str | None,
    inputs: Sequence[str],
    profile: Path | None,
) -> Given:
    """tree: what else was asked. Raises ValueError, a line a problem: two models, or one that is none."""
    job = tree.get("job", {})
    said = {"--recipe": recipe, "--module": module, "--profile": profile}
    several = [f"{option} {value}" for option, value in said.items() if value is not None]
    several += ["another one is named"] if several and "model" in tree else []
    if len(several) > 1:
        raise ValueError(f"{several[0]} has a model, and {several[1]}; leave one out")
    if settings and recipe is None:
        raise ValueError("--set changes a recipe; there is no --recipe")
    if inputs and module is None:
        raise ValueError("--input is what a module is traced with; there is no --module")
    if recipe is not None:
        from netfold.cli.plan_recipe import recipe_model

        model, says = recipe_model(recipe, settings)
        # On another number of devices its split means nothing.
        return Given(model, says | ({"split": {}} if isinstance(job, Mapping) and "gpus" in job else {}))
    if module is not None:
        from netfold.cli.plan_module import module_model

        # As DDP does it.
        return Given(module_model(module, inputs), {"job": {"overlap": True}})
    if profile is not None:
        from netfold.cli.plan_profile import profile_model

        seen, says = profile_model(profile, job if isinstance(job, Mapping) else {}, "cluster" in tree)
        return Given(seen.model, says, seen.device, None if isinstance(seen.network, str) else seen.network)
    return Given()
