"""torchft over netfold, two replica groups of one process:  python examples/ecosystem/torchft_ddp.py

The lines that change: a `ProcessGroupWrapper` whose `_create_pg` calls `netfold.torch.new_process_group`.
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
from torchft.coordination import LighthouseServer
from torchft.process_group import ProcessGroupWrapper

import netfold.torch

BACKEND = sys.argv[1] if len(sys.argv) > 1 else "netfold"
TIMEOUT = timedelta(seconds=60)


class ProcessGroupNetfold(ProcessGroupWrapper):
    def _create_pg(self, store, rank, world_size):
        return netfold.torch.new_process_group(store, rank, world_size, timeout=self._timeout)


def train(rank, backend, lighthouse):
    torch.manual_seed(0)
    x = torch.randn(256, 8)
    y = x.sum(1, keepdim=True)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    group = (ProcessGroupNetfold if backend == "netfold" else ProcessGroupGloo)(timeout=TIMEOUT)
    manager = Manager(
        pg=group, min_replica_size=2, load_state_dict=model.load_state_dict, state_dict=model.state_dict,
        rank=0, world_size=1, store_addr="localhost", store_port=store.port, lighthouse_addr=lighthouse,
        hostname="localhost", replica_id=f"replica_{rank}", timeout=TIMEOUT, use_async_quorum=False,
    )  # fmt: skip
    model, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, optimizer)
    while manager.current_step() < 16:
        optimizer.zero_grad()  # the replicas agree on who takes part in this step
        row = (manager.current_step() * 2 + rank) % 16 * 16
        loss = torch.nn.functional.mse_loss(model(x[row : row + 16]), y[row : row + 16])
        loss.backward()
        optimizer.step()  # applied when no replica met an error
    loss = loss.detach()
    manager.allreduce(loss).wait()
    if rank == 0:
        weights = torch.nn.utils.parameters_to_vector(model.parameters()).norm()
        name = group.parent.name() if backend == "netfold" else "gloo"
        print(f"backend {name}: loss {loss:.9g}, norm of the weights {weights:.9g}")
    manager.shutdown()


if __name__ == "__main__":
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=60000)
    mp.spawn(train, (BACKEND, lighthouse.address()), nprocs=2)
    lighthouse.shutdown()
