"""A group of handles joins the switch anew, as a job of its own, and the former group leaves it."""

from __future__ import annotations

import numpy as np
from ranks import run_threads, running_switch, values

from netfold import Communicator, FileStore, Options


def shrink(rank: int, size: int, folder: str, endpoint: str) -> list[int]:
    options = Options(switch=endpoint, probe="off", algorithm="in_network")
    with Communicator(FileStore(folder), rank, size, options=options, timeout_s=20, join_timeout_s=20) as group:
        assert group.group.membership is not None
        first = group.group.membership
        sums = [int(group.all_reduce(np.full(1000, rank + 1))[0])]
        if rank == 1:
            return sums
        group.shrink([1])
        assert group.group.membership is not None and group.group.membership is not first
        sums.append(int(group.all_reduce(np.full(1000, rank + 1))[999]))
        traffic = group.group.traffic()
        assert traffic is not None and traffic["packets_sent"] > 0
        store = FileStore(folder)
        store.set(f"done {rank}", b"")
        store.get(f"done {2 - rank}", 20)
        return sums


def test_the_next_group_joins_the_switch_anew() -> None:
    with running_switch() as switch:
        assert values(run_threads(shrink, 3, switch.endpoint)) == [[6, 4], [6], [6, 4]]
        switch.wait_for(r"started", count=2)
