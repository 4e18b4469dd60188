"""A failed allocation in the engine ends the group with an error. The process and other groups go on."""

from __future__ import annotations

import subprocess
from pathlib import Path

from load import seconds
from ranks import run_scripts

SHIM = Path(__file__).with_name("failing_new.cpp")

# Every allocation of a call fails in turn, on the caller's thread and on the engine's.
RANK = """
import ctypes, sys
import numpy as np
from netfold import Communicator, FileStore
from netfold.communicator import NetfoldError
from netfold.communicator.group import region

rank, folder, shim, timeout_s = int(sys.argv[1]), sys.argv[2], sys.argv[3], float(sys.argv[4])
fail_after = ctypes.CDLL(shim).fail_after if rank == 0 else lambda count, elsewhere: None
fine = failed = 0
with Communicator(FileStore(folder + "/other"), rank, 2, timeout_s=timeout_s) as other:
    for way in ("here", "engine"):
        for count in range(1, 26):
            try:
                with Communicator(FileStore(f"{folder}/{way}{count}"), rank, 2, timeout_s=timeout_s) as group:
                    values = np.arange(100_000, dtype=np.float32) + rank
                    group.barrier()
                    fail_after(count, way == "engine")
                    try:
                        if way == "here":
                            group.all_reduce(values)
                        else:
                            call = dict(dtype="f32", reduce="sum", outputs=[region(values)], timeout_s=timeout_s)
                            group.group.wait(group.group.submit("all_reduce", wait_here=False, **call))
                    finally:
                        fail_after(0, False)
                    assert (values == 2 * np.arange(100_000, dtype=np.float32) + 1).all()
                fine += 1
            except (MemoryError, NetfoldError) as error:
                failed += 1
                assert "timed out" not in str(error), error
            still = np.ones(10)
            other.all_reduce(still)
            assert (still == 2).all()
print(fine, failed)
"""


# Not marked native: the sanitizers must come first among preloaded libraries.
def test_every_allocation_of_a_call_may_fail(tmp_path: Path) -> None:
    shim = tmp_path / "failing_new.so"
    subprocess.run(["c++", "-shared", "-fPIC", "-o", shim, SHIM], check=True)
    said = run_scripts(RANK, 2, tmp_path, shim, seconds(20), env={0: {"LD_PRELOAD": str(shim)}})
    fine, failed = map(int, said[0].split())
    assert fine > 0
    assert failed > 0
