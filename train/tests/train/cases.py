"""Cases that share one world of ranks. A case is a function of (rank, folder, world); a test checks its results.

`world(size)` makes ranks 0..size-1 a job of their own within a `with` block.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ranks import run_ranks, values

World = Callable[[int], contextlib.AbstractContextManager[Any]]
Case = Callable[[int, Path, World], Any]


class Cases:
    """The results of `cases` on each of `ranks` ranks.

    All cases run at the first access, within `around`, which returns their environment variables.
    """

    def __init__(
        self,
        ranks: int,
        timeout_s: float,
        cases: Sequence[Case],
        around: Callable[[], contextlib.AbstractContextManager[dict[str, str]]] = lambda: contextlib.nullcontext({}),
    ) -> None:
        self._ranks, self._timeout_s, self._cases, self._around = ranks, timeout_s, cases, around
        self._found: list[dict[str, tuple[Any, str]]] = []

    def __getitem__(self, case: Case) -> list[Any]:
        """The results of a case by rank. Fails with the traceback of a rank on which the case failed."""
        if not self._found:
            with self._around() as env:
                self._found = values(run_ranks(_run, self._ranks, self._cases, env=env, timeout_s=self._timeout_s))
        for rank, found in enumerate(self._found):
            assert not found[case.__name__][1], f"rank {rank}: {found[case.__name__][1]}"
        return [found[case.__name__][0] for found in self._found]


def _run(rank: int, size: int, folder: str, cases: Sequence[Case]) -> dict[str, tuple[Any, str]]:
    """case -> (its result, the traceback of its error)."""
    import torch

    torch.set_num_threads(1)
    # Ranks outside a smaller world wait at the begin of the next one. `run_ranks` has the deadline of all cases.
    os.environ["NETFOLD_JOIN_TIMEOUT_S"] = "1500"
    found: dict[str, tuple[Any, str]] = {}
    took: dict[str, float] = {}
    for case in cases:
        began_s, at = time.monotonic(), Path(folder) / case.__name__
        try:
            found[case.__name__] = case(rank, at, _worlds(rank, at.with_suffix(".stores"))), ""
        except BaseException:
            found[case.__name__] = None, traceback.format_exc()
        took[case.__name__] = time.monotonic() - began_s
    if rank == 0:
        print({name: round(seconds, 2) for name, seconds in took.items()})
    return found


def _worlds(rank: int, stores: Path) -> World:
    """Ranks of the smaller world get torch.distributed, other ranks None. stores: a folder only for these worlds."""
    import torch.distributed as dist

    numbers = itertools.count()
    stores.mkdir(parents=True, exist_ok=True)

    @contextlib.contextmanager
    def world(ranks: int) -> Iterator[Any]:
        store = stores / f"{next(numbers)}"
        if rank >= ranks:
            yield None
            return
        dist.init_process_group("netfold", init_method=f"file://{store}", rank=rank, world_size=ranks)
        try:
            yield dist
        finally:
            dist.destroy_process_group()

    return world
