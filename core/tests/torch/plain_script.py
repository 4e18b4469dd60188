"""An ordinary training script that imports only torch. `torchrun plain_script.py RESULT_FOLDER`."""

import json
import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def train(dtype):
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 2)).to(dtype))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.full((4, 8), float(rank + step), dtype=dtype)).pow(2).mean().backward()
        optimizer.step()
    return [parameter.double().sum().item() for parameter in model.parameters()]


def main():
    torch.set_num_threads(1)
    found = {}
    for turn in range(2):  # a second group in the same process
        dist.init_process_group("netfold")
        rank, size = dist.get_rank(), dist.get_world_size()
        tensor = torch.arange(100_000, dtype=torch.float64) + rank
        dist.all_reduce(tensor)
        found[f"sum {turn}"] = tensor[-1].item()
        integers = torch.tensor([rank, -rank])
        dist.all_reduce(integers, dist.ReduceOp.MAX)
        found[f"max {turn}"] = integers.tolist()
        found[f"f64 {turn}"] = train(torch.float64)
        found[f"bf16 {turn}"] = train(torch.bfloat16)
        objects = [None] * size
        dist.all_gather_object(objects, {"rank": rank, "pid": os.getpid()})
        found[f"ranks {turn}"] = [each["rank"] for each in objects]
        dist.barrier()
        dist.destroy_process_group()
    with open(os.path.join(sys.argv[1], f"{rank}.json"), "w") as file:
        json.dump(found, file)
    if len(sys.argv) > 2 and sys.argv[2] == "fail":
        dist.init_process_group("netfold")
        dist.barrier()
        if rank == 2:
            raise ZeroDivisionError("the learning rate fell to nothing")
        dist.all_reduce(torch.ones(10))


main()
