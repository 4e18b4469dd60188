"""Examples that one rank cannot read: ranks that share samples use the same replacements."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cases import Cases, World

pytestmark = pytest.mark.torch


def unlike_disks(rank: int, folder: Path, world: World) -> Any:
    """Losses, notes and samples of each rank if none, some or all ranks cannot read two examples."""
    from surviving import Recorder, run

    from netfold_train import BadExampleError
    from netfold_train.data.sampler import Sampler, sample_seed

    seen = Sampler(96, 0).indices(0, 64)
    # An example of the second step, and its first replacement.
    instead = sample_seed(Sampler(96, 0).seeds(10, 1)[0], 0) % 96
    found: dict[str, Any] = {"gone": [seen[10], instead]}
    for name, gone in (
        ("none", {}),
        ("one", {seen[10]: (1,)}),
        ("both", {seen[10]: (0, 1)}),
        ("in turn", {seen[10]: (1,), instead: (0,)}),
        ("twice", {seen[10]: (0, 1), instead: (0, 1)}),
    ):

        def change(indices: Any, features: Any, gone: Any = gone) -> None:
            for index in indices:
                if rank in gone.get(index, ()):
                    raise BadExampleError(f"/data/{index}.png: No such file")

        with world(2):
            recorder, numbers = Recorder(), list[list[int]]()
            ended = run(
                None,
                noisy=False,
                recorder=recorder,
                change=change,
                forward=numbers.append,
                parallel={"pipeline": 2},
                fault_tolerance={"missing_data": "skip"},
            )
            found[name] = ended.losses, recorder.notes, numbers
    return found


FOUND = Cases(2, 100, [unlike_disks])


def test_stages_that_cannot_read_different_examples_train_on_the_same_replacements() -> None:
    first, second = FOUND[unlike_disks]
    assert first["one"][0] == first["both"][0] == second["one"][0] != first["none"][0]
    assert first["in turn"][0] == first["twice"][0] != first["one"][0]
    assert first["one"][2] == first["both"][2], "samples of the first stage"
    lost, instead = first["gone"]
    taken = [number for row in first["one"][2] for number in row]
    assert instead in taken and taken.count(lost) == 0
    assert any(f"/data/{lost}.png" in note for note in second["one"][1]), "the failing rank notes it"
