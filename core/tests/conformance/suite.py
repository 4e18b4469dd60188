"""PyTorch's own suite for process groups, as its wheel ships it, for one backend and world size; its tests stay as
they are.

    python suite.py BACKEND WORLD_SIZE CHOSEN_AS [--list | TEST ...]     # one JSON line a test on standard output

What is extended from outside, so that netfold is asked for all that gloo is asked for:

- The suite chooses its tests by the name of the backend while it is imported. It is imported as for CHOSEN_AS, gloo or
  mpi (all_to_all on CPU is asked of that one alone); then its name of the backend becomes one that reaches torch as
  BACKEND and compares equal to CHOSEN_AS as well.
- Tests of sub-groups ask for 8 ranks because of GPUs; on CPU they say what they mean from 3 ranks on (group [1, 2]).
- `dist.monitored_barrier` refuses every other name than gloo in torch itself; for a netfold group it is replaced by
  `netfold.torch.monitored_barrier`, which is what our users call.

Not extended: the suite's list of backends whose operations show up in the profiler as asynchronous events with shapes.
Those are made in C++ (docs/reference/torch.md).

Ranks are forked, so that a test costs no import of torch.
"""

from __future__ import annotations

import json
import os
import sys
import time
import unittest
from datetime import timedelta
from typing import Any

TEST_TIMEOUT_S = 90


class _Also(str):
    """`netfold` to torch, and `chosen_as` to the suite's comparisons."""

    chosen_as: str

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) or other == self.chosen_as

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


def load(backend: str, world_size: int, chosen_as: str) -> type[unittest.TestCase]:
    os.environ.update(
        BACKEND=chosen_as,
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29500",  # shown by tests, listened on by none
        DISTRIBUTED_TESTS_DEFAULT_TIMEOUT=str(TEST_TIMEOUT_S),
        INIT_METHOD="file:///",  # tests that come again after destroying a group ask for a file
        OMP_NUM_THREADS="1",
    )
    import torch
    import torch.distributed as dist
    from torch.testing._internal import common_distributed

    if world_size >= 3:
        common_distributed.skip_if_small_worldsize = lambda test: test
    common_distributed.DistTestCases.backend_feature["ddp"].add(chosen_as)
    common_distributed.DistTestCases.backend_feature["subgroup"].add(chosen_as)
    from torch.testing._internal.distributed import distributed_test

    torch.set_num_threads(1)
    common_distributed.TIMEOUT_OVERRIDE.clear()
    distributed_test.BACKEND = _Also(backend)
    distributed_test.BACKEND.chosen_as = chosen_as
    _offer_monitored_barrier(dist)

    class Suite(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
        def setUp(self) -> None:
            super().setUp()
            # The address of a fresh file, for tests that make the world again.
            distributed_test.INIT_METHOD = os.environ["INIT_METHOD"]
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    return Suite


def _offer_monitored_barrier(dist: Any) -> None:
    theirs = dist.monitored_barrier

    def monitored_barrier(
        group: Any = dist.group.WORLD, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        group = group or dist.group.WORLD
        if dist._rank_not_in_group(group) or dist.get_backend(group) != "netfold":
            theirs(group, timeout, wait_all_ranks)
            return
        import netfold.torch

        netfold.torch.monitored_barrier(group, timeout, wait_all_ranks)

    dist.monitored_barrier = monitored_barrier


class _Line(unittest.TestResult):
    """The outcome of one test."""

    def __init__(self) -> None:
        super().__init__()
        self.outcome, self.why = "passed", ""

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:  # noqa: N802
        self.outcome, self.why = "skipped", reason

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:  # noqa: N802
        self.outcome, self.why = "failed", str(err[1])

    addError = addFailure  # noqa: N815


def run(suite: type[unittest.TestCase], name: str) -> dict[str, Any]:
    """One test in `world_size` forked processes."""
    result = _Line()
    began = time.monotonic()
    suite(name).run(result)
    return {
        "test": name,
        "outcome": result.outcome,
        "why": result.why,
        "seconds": round(time.monotonic() - began, 2),
    }


def main() -> None:
    backend, world_size, chosen_as, *asked = sys.argv[1:]
    suite = load(backend, int(world_size), chosen_as)
    # What ranks print goes to standard error; standard output is for the results.
    results = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    names = unittest.TestLoader().getTestCaseNames(suite)
    if asked == ["--list"]:
        print("\n".join(names), file=results)
        return
    for name in asked or names:
        print(json.dumps(run(suite, name)), file=results)


if __name__ == "__main__":
    main()
