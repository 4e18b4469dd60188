"""What the training layer costs a step, over the same loop written by hand:

    .venv/bin/python bench/train_overhead.py [BLOCKS] [--ranks 1,2]      # 100 blocks; about six minutes

In each process `Trainer.fit` trains with all its default listeners, but for the profile of steps 11 to 60, which has
figures of its own (profile_cost.md), and with DDP's own bucket size. After each block of steps, the last listener runs
as many steps of the same model by hand: DDP, the same optimizer, batches made the same way by a thread that is one
ahead, the loss read each step. A block of the layer's is held against the mean of those by hand before and after it:
what the machine does besides falls on both. A model of one small layer shows what the layer costs in milliseconds,
which does not depend on the model.
NETFOLD_BENCH_WHERE=1 prints where rank 0's time goes in the layer's blocks (cProfile, which makes calls dear).
Writes bench/results/train_overhead.md.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from own_ranks import run_own_ranks

from netfold.bench.machine import spoken

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
# Short ones, and many: what the machine does besides comes and goes in seconds.
BLOCK_S = 0.3
# Percent, of models that are worth training; None: of the one that is there for the milliseconds.
GOALS = dict(zip(CASES, (2.0, 2.0, None), strict=True))
WARM_STEPS = 6
DEADLINE_S = 900
RESULT = Path(__file__).parent / "results" / "train_overhead.md"


def small_model() -> Any:
    import torch

    from netfold.train import Model

    return Model(torch.nn.Linear(8, 8), torch.nn.functional.mse_loss)


def small_data() -> Any:
    import torch

    from netfold.train import Batch, Data, Metric

    class Ones:
        def __len__(self) -> int:
            return 4096

        def batch(self, indices: Any, seeds: Any) -> Batch:
            return Batch((torch.ones(len(indices), 8),), torch.ones(len(indices), 8))

    score = lambda output, target: (output - target).square().mean(1)
    return Data(Ones(), Ones(), Metric("error", "", "lower", score, 1.0, "zeros"))


class ByHand:
    """The loop that somebody writes who needs no more than this recipe."""

    def __init__(self, trainer: Any) -> None:
        import torch
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        from netfold.train.models import make_model

        recipe = trainer.recipe
        torch.manual_seed(recipe.training.seed)
        model = make_model(recipe.model)
        self._loss = model.loss
        size = dist.get_world_size()
        self._module = DistributedDataParallel(model.module) if size > 1 else model.module
        self._optimizer = torch.optim.Adam(model.module.parameters(), lr=recipe.optimizer.lr)
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
        loss = self._loss(self._module(*batch.inputs), batch.target)
        loss.backward()
        self._optimizer.step()
        return float(loss.detach())


def clocks() -> tuple[float, float, float]:
    """Wall, and CPU of the training thread and of the process, in seconds."""
    return time.perf_counter(), time.thread_time(), time.process_time()


class Alternating:
    """The last to be told of a step: times the layer's blocks, and runs and times those by hand between them."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.by_hand: ByHand | None = None
        self.found: list[tuple[str, np.ndarray[Any, Any]]] = []
        self.profile = cProfile.Profile() if "NETFOLD_BENCH_WHERE" in os.environ else None
        self._began: np.ndarray[Any, Any] | None = None

    def on_step(self, event: Any) -> None:
        if event.step % self.steps:
            return
        if self.profile is not None:
            self.profile.disable()
        if self._began is not None:
            self.found.append(("layer", (np.array(clocks()) - self._began) / self.steps))
        assert self.by_hand is not None
        began = np.array(clocks())
        for _ in range(self.steps):
            self.by_hand.step()
        self.found.append(("by hand", (np.array(clocks()) - began) / self.steps))
        if self.profile is not None:
            self.profile.enable()
        self._began = np.array(clocks())

    def _nothing(self, event: Any) -> None:
        return

    on_start = on_evaluation = on_note = on_end = _nothing


def serve(rank: int, ranks: int, folder: str, case: str, blocks: int) -> None:
    """A rank: seconds a step, [blocks + 1 by hand, blocks of the layer's] x clocks, into a file."""
    import torch
    import torch.distributed as dist

    from netfold.train import Recipe, Trainer
    from netfold.train.callbacks.run_folder import run_folder
    from netfold.train.callbacks.selection import make_callbacks

    torch.set_num_threads(1)
    dist.init_process_group("netfold", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)

    def trainer(steps: int, name: str, last: Any) -> Any:
        table = {
            **CASES[case],
            "training": {**CASES[case]["training"], "steps": steps},
            "report": {"profile": False},
            # DDP's own size: the steps in which a better one is sought would be compared with steps that seek none.
            "parallel": {"bucket_mb": 25.0},
            "run": {"folder": folder, "name": name},
        }
        recipe = Recipe.model_validate(table)
        return Trainer(recipe, callbacks=[*make_callbacks(recipe, run_folder(recipe), rank), last])

    def fit(steps: int, name: str, block: int) -> Alternating:
        last = Alternating(block)
        training = trainer(steps, name, last)
        training.data = _few_held_out(training.data)
        last.by_hand = ByHand(training)
        training.fit()
        return last

    warm = fit(2 * WARM_STEPS, "warm", WARM_STEPS)
    seconds = torch.tensor([warm.found[-1][1][0]])
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    block = max(1, round(BLOCK_S / seconds.item()))
    found = fit(block * (blocks + 1), "timed", block)
    by_hand, layer = (np.stack([each for kind, each in found.found if kind == which]) for which in ("by hand", "layer"))
    np.savez(f"{folder}/{rank}.npz", by_hand=by_hand, layer=layer)
    if found.profile is not None and rank == 0:
        pstats.Stats(found.profile).sort_stats("cumulative").print_stats(45)
    dist.destroy_process_group()


def _few_held_out(data: Any) -> Any:
    """What comes after the last step is not timed: it need not take long."""
    from dataclasses import replace

    class Few:
        def __len__(self) -> int:
            return 16

        def batch(self, indices: Any, seeds: Any) -> Any:
            return data.held_out.batch(indices, seeds)

    return replace(data, held_out=Few(), pictures=None)


def measure(ranks: int, case: str, blocks: int) -> tuple[Any, Any]:
    """By hand [blocks + 1, clocks] and the layer's [blocks, clocks] seconds a step, the mean over ranks."""
    with tempfile.TemporaryDirectory(prefix="netfold-train-overhead-") as folder:
        keep = "NETFOLD_BENCH_WHERE"
        env = {"OMP_NUM_THREADS": "1"} | {name: os.environ[name] for name in (keep,) if name in os.environ}
        run_own_ranks(__file__, ranks, ranks, folder, case, blocks, deadline_s=DEADLINE_S, env=env)
        files = [np.load(f"{folder}/{rank}.npz") for rank in range(ranks)]
        by_hand, layer = (np.mean([file[name] for file in files], axis=0) for name in ("by_hand", "layer"))
        return by_hand, layer


def render(found: dict[tuple[str, int], tuple[Any, Any]], blocks: int, load: tuple[float, float]) -> str:
    head = (
        *("step", "ranks", "ms a step by hand", "wall time added", "90% interval", "ms"),
        *("CPU of the training thread added", "90% interval", "ms", "goal"),
    )
    lines = [
        "What the training layer costs a step, over the same loop by hand, in the same processes.",
        "",
        f"| {' | '.join(head)} |",
        f"|{'---|' * len(head)}",
    ]
    for (case, ranks), (by_hand, layer) in found.items():
        beside = (by_hand[:-1] + by_hand[1:]) / 2
        cells = [case, str(ranks), f"{1e3 * np.median(by_hand[:, 0]):.2f}"]
        for clock in (0, 1):
            added = layer[:, clock] - beside[:, clock]
            parts = 100 * added / beside[:, clock]
            low, high = np.percentile(medians_of(parts), (5, 95))
            cells += [f"{np.median(parts):+.1f}%", f"{low:+.1f} .. {high:+.1f}", f"{1e3 * np.median(added):+.2f}"]
        goal = GOALS[case]
        cells.append("-" if goal is None else f"{goal:.0f}%")
        lines.append(f"| {' | '.join(cells)} |")
    busy = (
        " The machine was busy with other things: wall times say little."
        if max(load) > (os.cpu_count() or 1) + 2
        else ""
    )
    lines += [
        "",
        f"{blocks} blocks of some {BLOCK_S:g} s each, medians of blocks and how far they may be off (bootstrap); the "
        "mean over ranks. Listeners: progress "
        "(not a terminal), metrics.jsonl, TensorBoard, the page; not the profile. On 2 ranks the thread's CPU has its "
        f"polling for the other rank in it.{busy} torch {version('torch')}; {spoken(load)}",
    ]
    return "\n".join(lines) + "\n"


def medians_of(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Medians of as many values, drawn from these again and again: how far the median itself may be off."""
    drawn = np.random.default_rng(0).integers(len(values), size=(2000, len(values)))
    return np.asarray(np.median(values[drawn], axis=1))


def main() -> None:
    if sys.argv[1:2] == ["rank"]:
        rank, ranks, folder, case, blocks = sys.argv[2:]
        return serve(int(rank), int(ranks), folder, case, int(blocks))
    parser = argparse.ArgumentParser(description="What the training layer costs a step.")
    parser.add_argument("blocks", nargs="?", type=int, default=100)
    parser.add_argument("--ranks", default="1,2")
    asked = parser.parse_args()
    load = os.getloadavg()[0]
    found = {
        (case, int(ranks)): measure(int(ranks), case, asked.blocks)
        for case in CASES
        for ranks in asked.ranks.split(",")
    }
    text = render(found, asked.blocks, (load, os.getloadavg()[0]))
    RESULT.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
