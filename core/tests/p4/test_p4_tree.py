"""Trees of P4 pipelines and switches in software: ranks in network namespaces, simple_switches between them.

Needs root, simple_switch and p4c-bm2-ss.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from p4_rack import CHUNKS_OF_STEP, Rack, Switch, check, results, wait_for
from p4_rig import NEEDS_PIPELINE, compile_program

from netfold._native import engine

pytestmark = NEEDS_PIPELINE

STEPS, LONG_STEPS = 4, 40
IN_NETWORK, F64 = engine.ALGORITHMS["in_network"], engine.DTYPES["f64"]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_program(tmp_path_factory.mktemp("p4"), 32, 1024)


def tree(folder: Path, root: Path | None, *leaves: Path | None) -> Rack:
    """Two hosts at each leaf, and one at the root: by the program of each switch, None in software."""
    above = Switch("root", root, [2 * len(leaves)])
    below = [Switch(f"leaf{n}", leaf, [2 * n, 2 * n + 1], above) for n, leaf in enumerate(leaves)]
    return Rack(folder, [above, *below])


@pytest.fixture(scope="module")
def by_software(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, np.ndarray]]:
    """The results of rank 0 in a tree of switches in software, by the number of steps."""
    folder = tmp_path_factory.mktemp("software")
    with tree(folder, None, None, None) as rack:
        for switch in rack.switches:
            rack.start_daemon(switch)
        own = {steps: folder / str(steps) for steps in (STEPS, LONG_STEPS)}
        return {steps: results(own[steps], rack.start_ranks(own[steps], steps))[0] for steps in own}


@pytest.fixture(
    scope="module",
    params=["software root", "pipeline root", "one leaf in software"],
)
def rack(request: pytest.FixtureRequest, program: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rack]:
    root = None if request.param == "software root" else program
    first = None if request.param == "one leaf in software" else program
    with tree(tmp_path_factory.mktemp("tree"), root, first, program) as there:
        for switch in there.switches:
            there.start_daemon(switch)
        yield there


def test_ranks_reduce_through_a_tree_with_the_bits_of_a_tree_in_software(
    rack: Rack, by_software: dict[int, dict[str, np.ndarray]]
) -> None:
    folder = rack.folder / "clean"
    own = results(folder, rack.start_ranks(folder, STEPS))
    check(own, by_software[STEPS])
    for each in own:
        # Operations that the profile cannot add went by a host algorithm on all ranks, those of a leaf in software too.
        np.testing.assert_array_equal(each["algorithms"] == IN_NETWORK, each["dtypes"] != F64)
    for switch in rack.switches:
        totals = rack.status(switch)["totals"]
        assert totals["results"] >= STEPS * CHUNKS_OF_STEP
        assert totals["contributions"] == (3 if switch.up is None else 2) * totals["results"]
        for reason in ("malformed", "foreign", "worker", "source", "window"):
            assert totals["drops"][reason] == 0, (switch.name, totals["drops"])


def test_packets_lost_on_every_link_of_a_tree_cost_no_sum(
    rack: Rack, by_software: dict[int, dict[str, np.ndarray]]
) -> None:
    folder = rack.folder / "lossy"
    with rack.lose(percent=2):
        check(results(folder, rack.start_ranks(folder, STEPS)), by_software[STEPS])
    for switch in rack.switches:
        assert rack.status(switch)["totals"]["results_resent"] > 0


@pytest.mark.parametrize("name", ["leaf0", "root"])
def test_a_pipeline_of_a_tree_that_is_killed_in_a_job_costs_no_sum_and_the_group_returns(
    program: Path, by_software: dict[int, dict[str, np.ndarray]], tmp_path: Path, name: str
) -> None:
    # Hosts have no other path, so the pipeline starts again at once.
    with tree(tmp_path, program, program, None) as rack:
        for switch in rack.switches:
            rack.start_daemon(switch)
        folder = tmp_path / "job"
        folder.mkdir()
        (folder / "slowly").touch()
        ranks = rack.start_ranks(folder, LONG_STEPS)
        log = folder / "log0"
        wait_for(log, "under way", ranks[0])
        (switch,) = [each for each in rack.switches if each.name == name]
        rack.kill_pipeline(switch)
        rack.start_pipeline(switch)
        wait_for(log, "is gone", ranks[0])
        wait_for(log, "has the group again", ranks[0])
        (folder / "slowly").unlink()
        own = results(folder, ranks)
        check(own, by_software[LONG_STEPS])
        for each in own:
            assert each["algorithms"][-1] == IN_NETWORK
