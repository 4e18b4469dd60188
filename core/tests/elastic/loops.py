"""A user's training loop over `netfold.elastic`, as tests run it in several processes, and the same loop in one.

Each sample is a function of its number, so that a sample that is lost or taken twice changes the weights. Weights are
f64: a division of a batch among other ranks changes them by rounding alone.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from load import seconds

SAMPLES = 24  # of a step
Hook = Callable[[Any, str], None]


def made() -> tuple[Any, Any, Any]:
    """A model, its optimizer and its schedule. Adam: a step that is made twice changes all later ones."""
    import torch

    torch.manual_seed(1)
    net = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
    return net, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)


def batch(numbers: range) -> tuple[Any, Any]:
    import torch

    at = torch.tensor(list(numbers), dtype=torch.float64)
    inputs = torch.stack([torch.sin(at * (1 + 0.37 * k) + k) for k in range(5)], 1)
    return inputs, torch.cos(0.11 * at)[:, None]


def loss_of(net: Any, numbers: range) -> Any:
    inputs, targets = batch(numbers)
    return (net(inputs) - targets).square().mean()


def weights(net: Any) -> list[float]:
    return [value for parameter in net.parameters() for value in parameter.detach().flatten().tolist()]


def serial(steps: list[tuple[range, ...]]) -> tuple[list[float], list[float]]:
    """The weights and losses after these steps, of the samples in these ranges."""
    import torch

    net, optimizer, scheduler = made()
    losses = []
    for ranges in steps:
        pairs = [batch(numbers) for numbers in ranges]
        inputs, targets = (torch.cat(each) for each in zip(*pairs, strict=True))
        optimizer.zero_grad()
        loss = (net(inputs) - targets).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return weights(net), losses


def whole_steps(steps: int, samples: int = SAMPLES) -> list[tuple[range, ...]]:
    return [(range(step * samples, (step + 1) * samples),) for step in range(steps)]


def join(folder: str, rank: int, size: int, *, options: Any = None, **limits: Any) -> Any:
    """The members: of the first `size` ranks, or a newcomer with a higher number."""
    from netfold import Communicator, FileStore, Options
    from netfold.elastic import Members

    store, options = FileStore(folder), options or Options(probe="off")
    if rank >= size:
        return Members.newcomer(store, options=options, timeout_s=20, join_timeout_s=20, **limits)
    communicator = Communicator(store, rank, size, options=options, timeout_s=20, join_timeout_s=20)
    return Members.of(communicator, store=store, join_timeout_s=20, **limits)


def train(
    members: Any, steps: int, hook: Hook = lambda world, moment: None, policy: Any = None, log: Any = None
) -> dict[str, Any]:
    """Train to `steps`. hook(world, moment): "forward", "backward" (a gradient is ready), "vote", "voted", "end"."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    import netfold.elastic as elastic

    torch.set_num_threads(1)
    net, optimizer, scheduler = made()
    state = elastic.State(model=net, optimizer=optimizer, scheduler=scheduler)
    losses: dict[int, float] = {}
    sizes: dict[int, int] = {}
    ddp: Any = None
    with elastic.World(state, policy=policy or elastic.Policy(SAMPLES), members=members) as world:

        def rebuild(world: Any) -> None:
            nonlocal ddp
            ddp = DistributedDataParallel(net, init_sync=False, bucket_cap_mb=0.0001)

        world.on_change(rebuild)
        next(net.parameters()).register_hook(lambda _: hook(world, "backward"))
        while world.step < steps and not world.left:
            step = world.step
            with world.attempt():
                optimizer.zero_grad()
                hook(world, "forward")
                loss = loss_of(ddp, world.part) * world.weight
                loss.backward()
                total = loss.detach().clone()
                torch.distributed.all_reduce(total)
                hook(world, "vote")
                optimizer.step()
                hook(world, "voted")
                scheduler.step()
                losses[step] = total.item() / world.size
                sizes[step] = world.size
                if log is not None:
                    log.append((step, [list(each) for each in world._divided().ranges]))
            hook(world, "end")
        return {
            "weights": weights(net), "losses": losses, "sizes": sizes, "generation": world.generation,
            "samples": world.samples, "rate": optimizer.param_groups[0]["lr"], "left": world.left,
        }  # fmt: skip


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def mark(folder: str, name: str) -> None:
    Path(folder, f"mark-{name}").touch()


def marked(folder: str, name: str) -> Callable[[], bool]:
    return Path(folder, f"mark-{name}").exists


def until(condition: Callable[[], Any], what: str, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + seconds(timeout_s)
    while not condition():
        assert time.monotonic() < deadline, f"not: {what}"
        time.sleep(0.005)
