"""The cost of the training layer in a step, over the same loop written by hand:

    .venv/bin/python lab/bench/train_overhead.py      # about six minutes

In each process `Trainer.fit` trains with all its default callbacks, except the profile of steps 11 to 60, which has
figures of its own (profile_cost.md), and with DDP's own bucket size. After each block of steps, the last callback runs
as many steps of the same model by hand: DDP with gradients that are views of its buckets, and fused Adam, as the layer
has them. A thread that is one ahead makes the batches, and the loss is read in each step. A block of the layer's is
compared with the mean of the blocks by hand before and after it: what else the machine does falls on both. A model of
one small layer shows what the layer costs in milliseconds, which does not depend on the model. NETFOLD_BENCH_WHERE=1
prints where rank 0's time goes in the layer's blocks (cProfile, which makes calls dear).
"""

from __future__ import annotations

import cProfile
import os
import pstats
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import driver
import numpy as np
from driver import Place, Rank

from netfold_train.callbacks.events import Callback

CASES: dict[str, dict[str, Any]] = {
    "EDSR, 16 blocks of 64 features": {
        "model": {"name": "edsr-baseline"},
        "data": {"name": "photos"},
        "training": {"batch": 8},
        "optimizer": {"name": "adam", "lr": 1e-4},
    },
    "GPT, 4 layers of 128": {
        "model": {"name": "gpt", "width": 128, "heads": 4, "layers": 4, "context": 128},
        "data": {"name": "source", "context": 128, "held_out": 0.005},
        "training": {"batch": 16},
        "optimizer": {"name": "adam", "lr": 1e-4},
    },
    "one linear layer of 8": {
        "model": {"name": "train_overhead:small_model"},
        "data": {"name": "train_overhead:small_data"},
        "training": {"batch": 8},
        "optimizer": {"name": "adam", "lr": 1e-4},
    },
}
# Short blocks, and many: what else the machine does comes and goes in seconds.
BLOCK_S = 0.3
# Percent, of models that are worth training; None: of the model that shows the milliseconds.
GOALS = dict(zip(CASES, (2.0, 2.0, None), strict=True))
WARM_STEPS = 6


def small_model() -> Any:
    import torch

    from netfold_train import Model

    return Model(torch.nn.Linear(8, 8), lambda output, target: (output - target).square())


def small_data() -> Any:
    import torch

    from netfold_train import Batch, Data, Metric

    class Ones:
        def __len__(self) -> int:
            return 4096

        def batch(self, indices: Any, seeds: Any) -> Batch:
            return Batch((torch.ones(len(indices), 8),), torch.ones(len(indices), 8))

    score = lambda output, target: (output - target).square().mean(1)
    return Data(Ones(), Ones(), Metric("error", "", "lower", score, 1.0, "zeros"))


class ByHand:
    """The training loop of this recipe, written by hand."""

    def __init__(self, trainer: Any) -> None:
        import torch
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        from netfold_train.models import make_model

        recipe = trainer.recipe
        torch.manual_seed(recipe.training.seed)
        model = make_model(recipe.model)
        self._losses = model.losses
        size = dist.get_world_size()
        self._module = DistributedDataParallel(model.module, gradient_as_bucket_view=True) if size > 1 else model.module
        self._optimizer = torch.optim.Adam(model.module.parameters(), lr=recipe.optimizer.lr, fused=True)
        self._examples, self._share = trainer.data.train, recipe.training.batch // size
        self._draw = np.random.default_rng(dist.get_rank())
        self._thread = ThreadPoolExecutor(1)
        self._ahead = self._thread.submit(self._batch)

    def _batch(self) -> Any:
        indices = self._draw.integers(len(self._examples), size=self._share).tolist()
        return self._examples.batch(indices, self._draw.integers(1 << 62, size=self._share).tolist())

    def step(self) -> float:
        batch, self._ahead = self._ahead.result(), self._thread.submit(self._batch)
        self._optimizer.zero_grad()
        loss = self._losses(self._module(*batch.inputs), batch.target).mean()
        loss.backward()
        self._optimizer.step()
        return float(loss.detach())


def clocks() -> np.ndarray[Any, Any]:
    """Wall, and CPU of the training thread, in seconds."""
    return np.array([time.perf_counter(), time.thread_time()])


class Alternating(Callback):
    """The last callback of a step: times the layer's blocks, and runs and times those by hand between them."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.by_hand: ByHand | None = None
        self.hand_s: list[np.ndarray[Any, Any]] = []
        self.layer_s: list[np.ndarray[Any, Any]] = []
        self.profile = cProfile.Profile() if "NETFOLD_BENCH_WHERE" in os.environ else None
        self._began: np.ndarray[Any, Any] | None = None

    def on_step(self, event: Any) -> None:
        if event.step % self.steps:
            return
        if self.profile is not None:
            self.profile.disable()
        if self._began is not None:
            self.layer_s.append((clocks() - self._began) / self.steps)
        assert self.by_hand is not None
        began = clocks()
        for _ in range(self.steps):
            self.by_hand.step()
        self.hand_s.append((clocks() - began) / self.steps)
        if self.profile is not None:
            self.profile.enable()
        self._began = clocks()


def train(me: Rank, case: str, blocks: int) -> None:
    """A rank. The order is the whole run: seconds per step, [blocks + 1 by hand, blocks of the layer's] x clocks."""
    import torch
    import torch.distributed as dist
    from timed_model import few_held_out

    from netfold_train import Recipe, Trainer
    from netfold_train.callbacks.run_folder import run_folder
    from netfold_train.callbacks.selection import make_callbacks

    def fit(steps: int, name: str, block: int) -> Alternating:
        table = {
            **CASES[case],
            "training": {**CASES[case]["training"], "steps": steps},
            "report": {"profile": False},
            # DDP's own size: the steps in which a better one is sought would be compared with steps that seek none.
            "parallel": {"bucket_mb": 25.0},
            "run": {"folder": str(me.folder), "name": name},
        }
        recipe = Recipe.model_validate(table)
        last = Alternating(block)
        trainer = Trainer(recipe, callbacks=[*make_callbacks(recipe, run_folder(recipe), me.rank), last])
        trainer.data = replace(few_held_out(trainer.data, 16), pictures=None)
        last.by_hand = ByHand(trainer)
        trainer.fit()
        return last

    def run() -> tuple[Any, Any]:
        warm = fit(2 * WARM_STEPS, "warm", WARM_STEPS)
        seconds = torch.tensor([warm.hand_s[-1][0]])
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        block = max(1, round(BLOCK_S / seconds.item()))
        found = fit(block * (blocks + 1), "timed", block)
        if found.profile is not None and me.rank == 0:
            pstats.Stats(found.profile).sort_stats("cumulative").print_stats(45)
        return np.stack(found.hand_s), np.stack(found.layer_s)

    with me.torch_group():
        me.serve(run)


def train_overhead(blocks: int = 100, ranks: str = "1,2") -> str:
    """The cost of the training layer"""
    rows = []
    for case in CASES:
        for size in map(int, ranks.split(",")):
            with driver.ranks_at(Place(size), train, case, blocks) as job:
                by_hand, layer = (np.mean(of, axis=0) for of in zip(*job.ask(), strict=True))
            beside = (by_hand[:-1] + by_hand[1:]) / 2
            cells = [case, str(size), f"{1e3 * np.median(by_hand[:, 0]):.2f}"]
            for clock in (0, 1):
                added = layer[:, clock] - beside[:, clock]
                parts = 100 * added / beside[:, clock]
                low, high = np.percentile(medians_of(parts), (5, 95))
                cells += [f"{np.median(parts):+.1f}%", f"{low:+.1f} .. {high:+.1f}", f"{1e3 * np.median(added):+.2f}"]
            goal = GOALS[case]
            rows.append([*cells, "-" if goal is None else f"{goal:.0f}%"])
    head = (
        "step | ranks | ms per step by hand | wall time added | 90% interval | ms "
        "| CPU of the training thread added | 90% interval | ms | goal"
    )
    return f"""Over the same loop by hand, in the same processes: {blocks} blocks of some {BLOCK_S:g} s each, medians of
blocks and how far they may be off (bootstrap); the mean over ranks. Callbacks: progress (not a terminal),
metrics.jsonl, TensorBoard, the page; not the profile. On 2 ranks the thread's CPU time includes polling for the other
rank. With a load above {(os.cpu_count() or 1) + 2} wall times mean little. torch {version("torch")}.

{driver.table(head, rows)}"""


def medians_of(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Medians of as many values, drawn from these again and again: how far the median itself may be off."""
    drawn = np.random.default_rng(0).integers(len(values), size=(2000, len(values)))
    return np.asarray(np.median(values[drawn], axis=1))


if __name__ == "__main__":
    driver.run(train_overhead)
