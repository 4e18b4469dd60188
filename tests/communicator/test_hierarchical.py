"""all_reduce through memory inside hosts and over the mesh between them. Hosts are made up: ranks are threads."""

from __future__ import annotations

import numpy as np
import pytest
from folds import contribution
from hosts import apart
from ranks import run_threads, values

from netfold import Communicator, FileStore, Options
from netfold.communicator import group as group_module

pytestmark = pytest.mark.native

# Even and uneven hosts, neighbours or not, some with one rank.
LAYOUTS = [(0, 0, 1, 1), (0, 1, 0, 1), (0, 0, 0, 1, 1), (0, 1, 1), (0, 0, 1, 1, 2, 2), (0, 1, 2, 2, 2, 1)]
COUNTS = (0, 1, 2, 3, 1000, 4097, 300_007)


def reduce(rank: int, size: int, folder: str, algorithm: str) -> tuple[tuple[int, ...], str]:
    options = Options(algorithm=algorithm, probe="off")
    with Communicator(FileStore(folder), rank, size, options=options, timeout_s=20, join_timeout_s=20) as group:
        for count in COUNTS:
            for op, dtype in (("sum", "int64"), ("max", "float32"), ("avg", "float64"), ("sum", "float32")):
                parts = [contribution(other, count, dtype) for other in range(size)]
                buffer = parts[rank].copy()
                group.all_reduce(buffer, op=op)
                if op == "max":
                    np.testing.assert_array_equal(buffer, np.max(parts, axis=0))
                elif dtype == "int64":
                    np.testing.assert_array_equal(buffer, np.sum(parts, axis=0))
                else:
                    # Any order of summation is within P roundings of the sum of magnitudes.
                    total = np.sum(parts, axis=0, dtype=np.longdouble) / (size if op == "avg" else 1)
                    bound = size * np.finfo(dtype).eps * np.sum(np.abs(parts), axis=0, dtype=np.longdouble)
                    assert (np.abs(buffer - total) <= bound).all()
            gathered = [np.empty(count, np.float32) for _ in range(size)]
            group.all_gather(contribution(rank, count, "float32"), gathered)  # over the mesh, in between
            np.testing.assert_array_equal(gathered[-1], contribution(size - 1, count, "float32"))
        events = group.group.events()
        run = {int(event["algorithm"]) for event in events if event["operation"] == 0}
        assert run == {group_module.engine.ALGORITHMS["hierarchical"]}
        return group.group.nodes, group.group.why("all_reduce", 1 << 20)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_rank_gets_the_sum(monkeypatch: pytest.MonkeyPatch, layout: tuple[int, ...]) -> None:
    monkeypatch.setattr(*apart(layout))
    for found, why in values(run_threads(reduce, len(layout), "all_reduce=hierarchical", timeout_s=60)):
        assert found == layout
        assert why.startswith("hierarchical")


def test_auto_takes_it_where_hosts_have_several_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = (0, 0, 1, 1)
    monkeypatch.setattr(*apart(layout))
    for _, why in values(run_threads(reduce, len(layout), "auto", timeout_s=60)):
        assert why.startswith("hierarchical (") and "between hosts" in why
