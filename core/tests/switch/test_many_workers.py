"""Jobs of hundreds of workers over a tree: workers that are no ranks, with real switches."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from ranks import running_switch

from netfold._native import protocol
from netfold.switch.stragglers import SHARED_S

sys.path.insert(0, str(Path(__file__).parents[3] / "lab" / "bench"))

from tree_admission import Worker, admit, run_job, running_tree, values_of

MiB = 1 << 20


def test_512_workers_over_four_leaves_add_find_the_straggler_and_leave() -> None:
    """The bench's job: every value of a sum is checked, and every worker learns which one is missing."""
    with running_tree(4) as tree:
        found: dict[str, Any] = asyncio.run(run_job(tree, 512))
        root, *leaves = tree
        assert root.count(r"switch of rank \d+ and 127 more of 512 joined") == 4
        assert all(leaf.count(r"rank \d+ of 512 joined") == 128 for leaf in leaves)
        assert all(leaf.count("event=left") == 128 for leaf in leaves)
        # 512 workers asked within a second: more than 8 open queries of a leaf would have been its end.
        assert not any(each.count("event=(ended|protocol_error)") for each in tree)
    # The root has four contributors, and not the job's workers.
    assert found["granted"][0] < 10 * found["granted"][1] / 128
    assert found["join_bytes"] < 2000
    assert found["memory"][0] < 8 * MiB and max(found["memory"]) < 32 * MiB


def test_a_switch_that_hangs_makes_stragglers_unknown_and_nobody_lost() -> None:
    """Its ranks may be late, so a switch that answers for it must not say that no rank is missing."""

    async def ask(workers: list[Worker], hangs: int) -> tuple[dict[str, Any], dict[str, Any]]:
        await admit(workers)
        contributions = [asyncio.ensure_future(each.contribute(0, values_of(each.number))) for each in workers[:3]]
        while (before := await workers[0].ask_stragglers(0))["ranks"] != [3]:
            await asyncio.sleep(0.05)
        os.kill(hangs, signal.SIGSTOP)
        try:
            await asyncio.sleep(2 * SHARED_S)
            return before, await workers[0].ask_stragglers(0)
        finally:
            os.kill(hangs, signal.SIGCONT)
            for each in contributions:
                each.cancel()
            await asyncio.gather(*(each.leave() for each in workers))

    with running_tree(2) as tree:
        workers = [Worker(number, tree[1 + number // 2].endpoint) for number in range(4)]
        before, hanging = asyncio.run(ask(workers, tree[2].process.pid))
    assert "unknown" not in before
    assert (hanging["ranks"], hanging["unknown"]) == ([], True)


def test_the_257th_worker_of_one_switch_gets_a_sentence_that_says_what_to_do() -> None:
    with running_switch() as switch:
        worker = Worker(0, switch.endpoint)
        refused = (
            f"a job has at most {protocol.MAX_WORKERS} workers here (--max-workers), not 257; several switches below "
            "this one (--parent) take more"
        )

        async def join() -> None:
            try:
                await worker.join("j" * 16, 257, None)
            finally:
                worker.close()

        with pytest.raises(SystemExit) as caught:
            asyncio.run(join())
        assert str(caught.value) == f"refused: {refused}"


def test_256_workers_of_one_switch_are_admitted() -> None:
    with running_tree(0) as tree:
        workers = [Worker(number, tree[0].endpoint) for number in range(256)]

        async def join_and_leave() -> dict[str, float]:
            found = await admit(workers)
            await asyncio.gather(*(each.leave() for each in workers))
            return found

        assert asyncio.run(join_and_leave())["join_bytes"] < 2000
        assert tree[0].count("epoch 1 starts with 256 workers") == 1
