"""Accelerate over netfold:  torchrun --nproc-per-node 2 examples/ecosystem/accelerate_ddp.py

The line that changes: `dist.init_process_group("netfold")` before `Accelerator(cpu=True)`.
"""

import sys

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

BACKEND = sys.argv[1] if len(sys.argv) > 1 else "netfold"

# On a CPU, Accelerate makes a group of gloo or MPI, and refuses other names. It takes a group that exists already.
dist.init_process_group(BACKEND)
accelerator = Accelerator(cpu=True)

torch.manual_seed(0)
x = torch.randn(256, 8)
data = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
model, optimizer, data = accelerator.prepare(model, optimizer, data)

for _ in range(2):
    for inputs, targets in data:
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

assert dist.get_backend() == BACKEND
loss = accelerator.reduce(loss.detach(), reduction="mean")
weights = torch.nn.utils.parameters_to_vector(model.parameters()).norm()
accelerator.print(f"backend {dist.get_backend()}: loss {loss:.9g}, norm of the weights {weights:.9g}")
accelerator.end_training()
