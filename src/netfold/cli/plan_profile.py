"""A profile's folder as the planner takes it: its step, the device it ran on, and its own network where none is asked
for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from netfold.plan.request.profile import ProfiledJob


def profile_model(folder: Path, job: Mapping[str, Any], elsewhere: bool) -> tuple[ProfiledJob, dict[str, Any]]:
    """What the folder shows, and what it says of a job. job: what was asked of it; elsewhere: a cluster was named.

    A profile does not know samples. Each rank trains on as many as on the one that was measured, so that many are
    counted as one where no batch is said. Raises ValueError, in a sentence.
    """
    from netfold.plan.request.profile import read_profile

    seen = read_profile(folder)
    if job.get("precision", seen.precision) != seen.precision:
        raise ValueError(
            f"{folder} was computed in {seen.precision}; how long {job['precision']} takes it does not say"
        )
    gpus = job.get("gpus", seen.model.ranks)
    batch = job.get("batch", gpus)
    if all(isinstance(each, int) and each > 0 for each in (gpus, batch)):
        if batch % gpus:
            raise ValueError(
                f"a batch of {batch} does not come out even over {gpus} devices; each has as many samples as a rank of "
                f"{folder} had"
            )
        seen = seen.of_samples(batch // gpus)
    if not elsewhere and isinstance(seen.network, str):
        raise ValueError(f"{folder} does not show its network: {seen.network}; name one with --cluster")
    return seen, {
        "job": {
            "gpus": gpus,
            "batch": batch,
            "precision": seen.precision,
            "gradient_bytes": seen.gradient_bytes,
            "overlap": True,
        },
        "split": {
            "tensor": 1,
            "pipeline": 1,
            "zero": 0,
            "recompute": "none",
            "micro_batch": seen.model.samples,
        },
    }
