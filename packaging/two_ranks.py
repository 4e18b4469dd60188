"""One of two ranks: all_reduce arrays of distinct values, and compare with NumPy. Run both, with RANK=0 and RANK=1.

RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29871 python packaging/two_ranks.py
"""

import platform

import numpy as np

import netfold

with netfold.Communicator.from_environment() as group:
    for dtype in (np.float16, np.float32, np.float64, np.int32):
        for count in (1, 4099, 1 << 18):
            ours = [(np.arange(count) % 1009 + 3 * rank).astype(dtype) for rank in range(2)]
            buffer = ours[group.rank].copy()
            group.all_reduce(buffer)
            np.testing.assert_array_equal(buffer, ours[0] + ours[1])
    group.barrier()
    where = f"netfold {netfold.__version__}, Python {platform.python_version()}, {platform.machine()}"
    print(f"rank {group.rank}: {where}: 12 all_reduces of 2 ranks are right")
