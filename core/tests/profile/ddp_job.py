"""An ordinary DDP job without a line about profiles. `ddp_job.py BACKEND STEPS`."""

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

backend, steps = sys.argv[1], int(sys.argv[2])
dist.init_process_group(backend)
rank = dist.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(100, 10, bias=False))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(steps):
    optimizer.zero_grad()
    model(torch.ones(4, 100) * (rank + 1)).sum().backward()
    optimizer.step()
# Sizes that no other operation of this job has.
for elements in (7, 77, 777):
    dist.all_reduce(torch.ones(elements, dtype=torch.float64))
dist.broadcast(torch.ones(33, dtype=torch.int32), 0)
dist.destroy_process_group()
