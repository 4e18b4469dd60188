"""The engine's thread sleeps while there is no work, and misses no request while it prepares to sleep."""

from __future__ import annotations

import subprocess
from pathlib import Path

from load import seconds
from ranks import run_scripts

SHIM = Path(__file__).with_name("slow_clears.c")

# Rank 0's receive from rank 2 stays pending, so the engine's thread drives rank 0's group throughout.
RANK = """
import sys, time
import numpy as np
from netfold import Communicator, FileStore
from netfold.communicator.group import region

rank, folder, timeout_s = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
def start(kind, buffer, peer, tag):
    place = {"inputs" if kind == "send" else "outputs": [region(buffer)]}
    return group.group.submit(kind, dtype="f32", root=peer, tag=tag, wait_here=False, timeout_s=timeout_s, **place)

with Communicator(FileStore(folder), rank, 3, timeout_s=timeout_s, join_timeout_s=timeout_s) as group:
    value = np.zeros(4, np.float32)
    if rank == 0:
        last = np.zeros(4, np.float32)
        pending = start("receive", last, 2, 9)
        for number in range(60):
            time.sleep(number / 2000)  # at some of these times the engine's thread goes to sleep
            group.group.wait(start("receive", value, 1, 1))
            assert value[0] == number
            group.send(value, 1, tag=3)
        group.send(value, 2, tag=2)
        group.group.wait(pending)
    elif rank == 1:
        for number in range(60):
            time.sleep(0.06)
            value[:] = number
            group.send(value, 0, tag=1)
            group.receive(value, 0, tag=3)
    else:
        group.receive(value, 0, tag=2)
        group.send(value, 0, tag=9)
    group.barrier()
"""


# Not marked native: the sanitizers must come first among preloaded libraries.
def test_a_receive_that_is_posted_while_the_engine_goes_to_sleep_is_seen(tmp_path: Path) -> None:
    shim = tmp_path / "slow_clears.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", shim, SHIM], check=True)
    run_scripts(RANK, 3, tmp_path, seconds(20), env={0: {"LD_PRELOAD": str(shim)}})
