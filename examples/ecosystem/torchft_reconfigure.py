"""torchft over a group that torch made: python examples/ecosystem/torchft_reconfigure.py

Three replicas train; replica 2 is killed, and a new one takes its place. The group of the other two stays one object:
torchft calls its `reconfigure`. Training ends after 30 steps of all three replicas: the other two train on until the
new one is there. Needs torch 2.15 and a torchft that takes such groups (torchft-nightly 2026.10.26).
The line that changes: `init_process_group("netfold", enable_reconfigure=True)`.
"""

import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torchft import DistributedDataParallel, Manager, Optimizer
from torchft.coordination import LighthouseServer

# STEPS: those that all replicas took part in. LIMIT_S: the longest training, since the new replica may never start.
REPLICAS, STEPS, DIES_AT, LIMIT_S = 3, 30, 4, 150
TIMEOUT = timedelta(seconds=60)


def train(replica, attempt, port, lighthouse):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x = torch.randn(256, 8)
    y = x.sum(1, keepdim=True)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    store = dist.TCPStore("localhost", port, is_master=False)
    # In no group, and waits for nobody: a replica is one process here, and torchft decides who is in.
    own = dist.PrefixStore(f"{replica}/{attempt}", store)
    dist.init_process_group("netfold", store=own, rank=0, world_size=1, timeout=TIMEOUT, enable_reconfigure=True)

    # Steps of all replicas so far. A part of the state, so that all replicas end after the same step.
    whole = 0

    def load(state):
        nonlocal whole
        whole = state["whole"]
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    of_replica = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=dist.group.WORLD, min_replica_size=2, load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "whole": whole},
        rank=0, world_size=1, store_addr="localhost", store_port=of_replica.port, lighthouse_addr=lighthouse,
        hostname="localhost", replica_id=f"replica_{replica}_", timeout=TIMEOUT, use_async_quorum=False,
    )  # fmt: skip
    averaged, stepped = DistributedDataParallel(manager, model), Optimizer(manager, optimizer)
    sizes, began = [], time.monotonic()
    while whole < STEPS:
        if (replica, attempt, whole) == (2, 0, DIES_AT):
            os.kill(os.getpid(), signal.SIGKILL)
        if time.monotonic() - began > LIMIT_S:
            raise TimeoutError(f"replica {replica}: {whole} of {STEPS} steps of all replicas after {LIMIT_S} s")
        stepped.zero_grad()
        step = manager.current_step()
        row = (step * REPLICAS + replica) % 16 * 16
        torch.nn.functional.mse_loss(averaged(x[row : row + 16]), y[row : row + 16]).backward()
        stepped.step()  # applied when no replica met an error
        sizes.append(dist.get_world_size())
        if sizes[-1] == REPLICAS and manager.current_step() > step:
            whole += 1
        time.sleep(0.1)  # for a model whose step takes longer: the last line lists each step
    weights = torch.nn.utils.parameters_to_vector(model.parameters()).norm()
    # One write: Python may write the end of a printed line apart, and another replica's line comes between.
    sys.stdout.write(f"replica {replica}: sizes {sizes}, norm of the weights {weights:.9g}\n")
    sys.stdout.flush()
    store.set(f"done/{replica}", "")
    store.wait([f"done/{each}" for each in range(REPLICAS)], TIMEOUT)
    manager.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    # A quorum waits for each replica that sends heartbeats: a slow one is not left out of a step.
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=60_000)
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)

    def start(replica, attempt):
        process = mp.get_context("spawn").Process(
            target=train, args=(replica, attempt, store.port, lighthouse.address())
        )
        process.start()
        return process

    first, second, dies = (start(replica, 0) for replica in range(REPLICAS))
    dies.join()
    others = [first, second, start(2, 1)]
    for process in others:
        process.join()
    lighthouse.shutdown()
    if any(process.exitcode for process in others):
        raise SystemExit(f"the replicas ended with {[process.exitcode for process in others]}")
