"""The builder of synthetic runs, against the files of a rank's own writer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from traces import ALGORITHMS, DTYPES, ERRORS, OPERATIONS, training, write_run

from netfold._native import engine
from netfold.profile.run import read_run


def test_names_are_numbered_as_the_native_engine_does() -> None:
    assert {name: index for index, name in enumerate(OPERATIONS)} == engine.KINDS
    assert {name: index for index, name in enumerate(ALGORITHMS)} == engine.ALGORITHMS
    assert ERRORS == engine.FAILURES
    assert all(engine.DTYPES[name] == index for index, name in enumerate(DTYPES))


def test_a_run_survives_being_written_and_read(tmp_path: Path) -> None:
    made = training(3, 5)
    read = read_run(write_run(made, tmp_path / "run"))
    assert read.description == {"command": ["python", "train.py"]}
    assert [trace.metadata for trace in read.traces] == [trace.metadata for trace in made.traces]
    for one, other in zip(made.traces, read.traces, strict=True):
        assert len(one.operations) == 31 and len(one.steps) == 5
        for name in ("operations", "steps", "progress"):
            assert np.array_equal(getattr(one, name), getattr(other, name))
