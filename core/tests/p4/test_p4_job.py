"""Jobs on a P4 pipeline: ranks in network namespaces, a simple_switch between them, `netfold switch` as control plane.

Needs root, simple_switch and p4c-bm2-ss.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import numpy as np
import pytest
from p4_rack import CHUNKS_OF_STEP, Rack, Switch, check, results, wait_for
from p4_rig import NEEDS_PIPELINE, compile_program

from netfold._native import engine
from netfold_lab.rack.processes import Process, stop

pytestmark = NEEDS_PIPELINE

HOSTS = 3
STEPS, LONG_STEPS = 6, 40
SOFTWARE_PORT = 7272

# Trains a model by DDP in argv[2] steps, and writes the bits of its weights.
TRAIN = """
import sys
import numpy as np
import torch
import torch.distributed as dist
folder, steps = sys.argv[1], int(sys.argv[2])
dist.init_process_group("netfold")
rank = dist.get_rank()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(40, 60), torch.nn.Tanh(), torch.nn.Linear(60, 10))
ddp = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
draw = torch.Generator().manual_seed(rank)
for _ in range(steps):
    loss = (ddp(torch.randn(8, 40, generator=draw)) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
weights = torch.cat([each.detach().flatten() for each in model.parameters()]).numpy()
np.savez(f"{folder}/rank{rank}", weights=weights.view(np.uint32), loss=loss.item())
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def rack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rack]:
    folder = tmp_path_factory.mktemp("job")
    with Rack(folder, [Switch("switch", compile_program(folder, 32, 4096), range(HOSTS))]) as there:
        yield there


@pytest.fixture(scope="module")
def switch(rack: Rack) -> Switch:
    return rack.switches[0]


@pytest.fixture(scope="module")
def pipeline_daemon(rack: Rack, switch: Switch) -> Iterator[Process]:
    daemon = rack.start_daemon(switch)
    yield daemon
    stop([daemon])


IN_NETWORK, F64 = engine.ALGORITHMS["in_network"], engine.DTYPES["f64"]


@pytest.mark.torch
def test_ddp_trains_through_the_pipeline_to_the_weights_of_the_software_switch(
    rack: Rack, switch: Switch, pipeline_daemon: Process
) -> None:
    pytest.importorskip("torch")
    daemon = rack.start_daemon(switch, SOFTWARE_PORT, software=True)
    folder = rack.folder / "ddp-software"
    software = results(folder, rack.start_ranks(folder, STEPS, port=SOFTWARE_PORT, script=TRAIN))
    stop([daemon])
    before = rack.status(switch)["totals"]["results"]
    folder = rack.folder / "ddp"
    own = results(folder, rack.start_ranks(folder, STEPS, script=TRAIN))
    for each in own:
        np.testing.assert_array_equal(each["weights"], software[0]["weights"])
    # 3,070 gradients, 32 in a packet, in each step.
    assert rack.status(switch)["totals"]["results"] - before >= STEPS * 96


@pytest.fixture(scope="module")
def by_software(rack: Rack, switch: Switch, pipeline_daemon: Process) -> dict[int, dict[str, np.ndarray]]:
    """The results of rank 0 with a software switch beside the pipeline's daemon, by the number of steps."""
    daemon = rack.start_daemon(switch, SOFTWARE_PORT, software=True)
    found = {}
    for steps in (STEPS, LONG_STEPS):
        folder = rack.folder / f"software{steps}"
        found[steps] = results(folder, rack.start_ranks(folder, steps, port=SOFTWARE_PORT))[0]
    stop([daemon])
    return found


def test_ranks_reduce_through_the_pipeline_with_the_bits_of_the_software_switch(
    rack: Rack, switch: Switch, by_software: dict[int, dict[str, np.ndarray]]
) -> None:
    folder = rack.folder / "pipeline"
    before = rack.status(switch)["totals"]
    own = results(folder, rack.start_ranks(folder, STEPS))
    check(own, by_software[STEPS])
    for each in own:
        # What the profile cannot add went by a host algorithm, and only that.
        by_switch = each["algorithms"] == IN_NETWORK
        np.testing.assert_array_equal(by_switch, each["dtypes"] != F64)
    totals = rack.status(switch)["totals"]
    assert totals["results"] - before["results"] >= STEPS * CHUNKS_OF_STEP
    assert totals["contributions"] == HOSTS * totals["results"]
    for reason in ("malformed", "foreign", "worker", "source", "window"):
        assert totals["drops"][reason] == 0, totals["drops"]


def test_lost_packets_cost_no_sum(rack: Rack, switch: Switch, by_software: dict[int, dict[str, np.ndarray]]) -> None:
    before = rack.status(switch)["totals"]
    folder = rack.folder / "lossy"
    with rack.lose(percent=3):
        check(results(folder, rack.start_ranks(folder, STEPS)), by_software[STEPS])
    assert rack.status(switch)["totals"]["results_resent"] > before["results_resent"]


def test_a_control_plane_that_dies_costs_no_step_and_the_group_returns_to_the_pipeline(
    rack: Rack, switch: Switch, pipeline_daemon: Process, by_software: dict[int, dict[str, np.ndarray]]
) -> None:
    folder = rack.folder / "killed"
    folder.mkdir()
    (folder / "slowly").touch()
    ranks = rack.start_ranks(folder, LONG_STEPS)
    log = folder / "log0"
    wait_for(log, "under way", ranks[0])
    # The daemon is a child of `ip netns exec`, which becomes it.
    os.kill(pipeline_daemon.pid, signal.SIGKILL)
    wait_for(log, "is gone", ranks[0])
    daemon = rack.start_daemon(switch)
    try:
        wait_for(log, "has the group again", ranks[0])
        (folder / "slowly").unlink()
        check(results(folder, ranks), by_software[LONG_STEPS])
        assert rack.status(switch)["totals"]["results"] > 0
    finally:
        stop([daemon])
