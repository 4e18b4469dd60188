"""torchtitan's Llama 3 with FSDP2 over netfold:  torchrun --nproc-per-node 2 examples/ecosystem/torchtitan_fsdp.py

The line that changes: `dist.init_process_group("netfold")` before torchtitan's `init_distributed`,
which keeps the group that exists.
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

# This example trains on the CPU. torchtitan takes a machine without an accelerator for one with CUDA.
torch._utils._get_available_device_type = lambda: "cpu"

from torchtitan.config import JobConfig  # noqa: E402
from torchtitan.distributed import ParallelDims  # noqa: E402
from torchtitan.distributed import utils as dist_utils  # noqa: E402
from torchtitan.models.llama3 import Transformer, TransformerModelArgs, parallelize_llama  # noqa: E402

BACKEND = sys.argv[1] if len(sys.argv) > 1 else "netfold"

dist.init_process_group(BACKEND)
config = JobConfig()
config.training.seq_len = 32
config.training.mixed_precision_param = "float32"
config.activation_checkpoint.mode = "none"
size = dist_utils.init_distributed(config.comm)
dims = ParallelDims(dp_replicate=1, dp_shard=size, cp=1, tp=1, pp=1, ep=1, etp=1, world_size=size)
mesh = dims.get_mesh("fsdp")

with torch.device("meta"):
    arguments = TransformerModelArgs(dim=32, n_layers=2, n_heads=2, vocab_size=64, multiple_of=32, max_seq_len=64)
    model = Transformer(arguments)
model = parallelize_llama(model, dims, config)
for module in model.modules():
    if BACKEND == "gloo" and isinstance(module, FSDPModule):
        module.set_force_sum_reduction_for_comms(True)  # gloo has no ReduceOp.PREMUL_SUM, which FSDP2 uses here
model.to_empty(device="cpu")
torch.manual_seed(0)
with torch.no_grad():
    model.init_weights()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

tokens = torch.stack([torch.arange(start, start + 3 * 33, 3) % 64 for start in range(64)])
for step in range(8):
    rows = [(step * 8 + index * size + dist.get_rank()) % 64 for index in range(4)]
    loss = torch.nn.functional.cross_entropy(model(tokens[rows, :-1]).flatten(0, 1), tokens[rows, 1:].flatten())
    loss = loss / size  # torchtitan adds gradients up
    optimizer.zero_grad()
    loss.backward()
    dist_utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()

assert dist.get_backend(mesh.get_group()) == BACKEND
loss = dist_utils.dist_sum(loss.detach(), dims.get_mesh("loss"))
weights = torch.cat([parameter.full_tensor().flatten() for parameter in model.parameters()]).norm()
if dist.get_rank() == 0:
    print(f"backend {dist.get_backend()}: loss {loss:.9g}, norm of the weights {weights:.9g}")
dist.destroy_process_group()
