"""Lightning over netfold, two processes:  python examples/ecosystem/lightning_ddp.py

The line that changes: `DDPStrategy(process_group_backend="netfold")`.
"""

import sys

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, TensorDataset

BACKEND = sys.argv[1] if len(sys.argv) > 1 else "netfold"


class Regression(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))

    def training_step(self, batch, index):
        x, y = batch
        self.loss = torch.nn.functional.mse_loss(self.layers(x), y)
        return self.loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)

    def on_train_end(self):
        assert dist.get_backend() == BACKEND
        loss = self.loss.detach().clone()
        dist.all_reduce(loss)
        if dist.get_rank() == 0:
            weights = torch.nn.utils.parameters_to_vector(self.parameters()).norm()
            print(f"backend {dist.get_backend()}: loss {loss / 2:.9g}, norm of the weights {weights:.9g}")


torch.manual_seed(0)
x = torch.randn(256, 8)
data = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16)
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=2,
    strategy=DDPStrategy(process_group_backend=BACKEND),
    max_epochs=2,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Regression(), data)
