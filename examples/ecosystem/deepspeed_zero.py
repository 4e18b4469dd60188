"""DeepSpeed's ZeRO over netfold:  torchrun --nproc-per-node 2 examples/ecosystem/deepspeed_zero.py

The line that changes: `deepspeed.init_distributed("netfold")`.
"""

import sys

import deepspeed
import torch
import torch.distributed as dist

BACKEND = sys.argv[1] if len(sys.argv) > 1 else "netfold"
STAGE = int(sys.argv[2]) if len(sys.argv) > 2 else 2

deepspeed.init_distributed(BACKEND)
rank, size = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)
x = torch.randn(256, 8)
y = x.sum(1, keepdim=True)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
engine, _, _, _ = deepspeed.initialize(
    model=model,
    optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
    config={
        "train_micro_batch_size_per_gpu": 16,
        "zero_optimization": {"stage": STAGE},
        "bf16": {"enabled": False},
    },
)

for step in range(16):
    rows = slice((step * size + rank) % 16 * 16, (step * size + rank) % 16 * 16 + 16)
    loss = torch.nn.functional.mse_loss(engine(x[rows]), y[rows])
    engine.backward(loss)
    engine.step()

assert dist.get_backend() == BACKEND
loss = loss.detach()
dist.all_reduce(loss)
if rank == 0:
    weights = torch.nn.utils.parameters_to_vector(engine.module.parameters()).norm()
    print(f"backend {dist.get_backend()}: loss {loss / size:.9g}, norm of the weights {weights:.9g}")
dist.destroy_process_group()
