"""A Horovod training script for torch with one import changed; its data are drawn here, nothing is downloaded.

torchrun --nproc-per-node 2 examples/horovod_torch_mnist.py
python examples/launch.py 2 examples/horovod_torch_mnist.py
"""

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn

import netfold.horovod.torch as hvd

# The segments that each digit lights, of seven: top, upper left, upper right, middle, lower left, lower right, bottom.
DIGITS = ("1110111", "0010010", "1011101", "1011011", "0111010", "1101011", "1101111", "1010010", "1111111", "1111011")
SEGMENTS = (
    (slice(1, 2), slice(3, 9)), (slice(1, 6), slice(3, 4)), (slice(1, 6), slice(8, 9)), (slice(5, 6), slice(3, 9)),
    (slice(5, 11), slice(3, 4)), (slice(5, 11), slice(8, 9)), (slice(10, 11), slice(3, 9)),
)  # fmt: skip


def draw(count: int, seed: int) -> torch.utils.data.TensorDataset:
    """Noisy 12 x 12 pictures of digits as a clock shows them, moved by up to a pixel."""
    generator = torch.Generator().manual_seed(seed)
    clean = torch.zeros(10, 12, 12)
    for digit, lit in enumerate(DIGITS):
        for segment, on in zip(SEGMENTS, lit, strict=True):
            if on == "1":
                clean[digit][segment] = 1.0
    targets = torch.randint(10, (count,), generator=generator)
    moves = torch.randint(-1, 2, (count, 2), generator=generator).tolist()
    moved = torch.stack([clean[t].roll(move, (0, 1)) for t, move in zip(targets, moves, strict=True)])
    noise = 0.2 * torch.randn(count, 12, 12, generator=generator)
    return torch.utils.data.TensorDataset((moved + noise)[:, None], targets)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 8, 5)
        self.hidden = nn.Linear(8 * 16, 64)
        self.output = nn.Linear(64, 10)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        features = F.relu(F.max_pool2d(self.convolution(inputs), 2)).flatten(1)
        return self.output(F.relu(self.hidden(features)))


def main() -> None:
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(hvd.rank())
    data, held_out = draw(1200, seed=1), draw(500, seed=2)
    sampler: torch.utils.data.Sampler = torch.utils.data.distributed.DistributedSampler(
        data, num_replicas=hvd.size(), rank=hvd.rank()
    )
    loader = torch.utils.data.DataLoader(data, batch_size=32 // hvd.size(), sampler=sampler)

    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=hvd.Compression.fp16
    )
    for epoch in range(3):
        sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()

    inputs, targets = (each[hvd.rank() :: hvd.size()] for each in held_out.tensors)
    with torch.no_grad():
        right = (model(inputs).argmax(1) == targets).sum()
    accuracy = hvd.allreduce(right, op=hvd.Sum, name="right").item() / len(held_out)
    apart = [hvd.allreduce(p.data, op=hvd.Max) - hvd.allreduce(p.data, op=hvd.Min) for p in model.parameters()]
    assert all((each == 0).all() for each in apart), "ranks have different parameters"
    if hvd.rank() == 0:
        print(f"{hvd.size()} ranks: {accuracy:.1%} of digits never seen are read right")
    assert accuracy > 0.8, "it has not learned"
    hvd.shutdown()


if __name__ == "__main__":
    main()
