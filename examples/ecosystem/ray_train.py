"""Ray Train over netfold, two workers:  python examples/ecosystem/ray_train.py

The line that changes: `TorchConfig(backend="netfold")`.
"""

import sys
import tempfile

import ray
import torch
import torch.distributed as dist
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model

BACKEND = sys.argv[1] if len(sys.argv) > 1 else "netfold"


def train(config):
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    x = torch.randn(256, 8)
    y = x.sum(1, keepdim=True)
    model = prepare_model(torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(16):
        rows = slice((step * size + rank) % 16 * 16, (step * size + rank) % 16 * 16 + 16)
        loss = torch.nn.functional.mse_loss(model(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert dist.get_backend() == config["backend"]
    loss = loss.detach()
    dist.all_reduce(loss)
    weights = torch.nn.utils.parameters_to_vector(model.parameters()).norm()
    return f"backend {dist.get_backend()}: loss {loss / size:.9g}, norm of the weights {weights:.9g}"


ray.init(num_cpus=2)
with tempfile.TemporaryDirectory() as folder:
    trainer = TorchTrainer(
        train,
        train_loop_config={"backend": BACKEND},
        torch_config=TorchConfig(backend=BACKEND),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=folder),
    )
    print(trainer.fit().return_value)  # that of rank 0
ray.shutdown()
