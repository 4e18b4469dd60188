"""A rank of `closed_loop.py`, on a host of the rack: trains with the layers' timers, every way in turn.

    python bench/closed_loop_rank.py ONE_HOST.json FOLDER TURNS SETTLING STEPS

ONE_HOST: as `one_host.py` writes it; its timers are what layers take here. A step is what lies between the ends of two,
as rank 0 sees it: all ranks have met in the word of all ranks by then.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
from one_host import recipe_of
from timed_model import First, LayerTime, timed

from netfold.train import Trainer
from netfold.train.datasets import make_data
from netfold.train.models import make_model

# Way -> torch's backend, and what is set for it; the switch's address is the rack's.
WAYS: dict[str, tuple[str, dict[str, str]]] = {
    "gloo, ring": ("gloo", {}),
    "netfold, ring": (
        "netfold",
        {"NETFOLD_ALGORITHM": "all_reduce=ring", "NETFOLD_TRANSPORT": "tcp", "NETFOLD_WIRE_DTYPE": "f32"},
    ),
    "in-network, f32": ("netfold", {"NETFOLD_ALGORITHM": "all_reduce=in_network", "NETFOLD_WIRE_DTYPE": "f32"}),
    "in-network, bf16": ("netfold", {"NETFOLD_ALGORITHM": "all_reduce=in_network", "NETFOLD_WIRE_DTYPE": "bf16"}),
}


def chosen(way: str, switch: str) -> str:
    """Set for the groups that are made from now on; the backend's name."""
    backend, settings = WAYS[way]
    for name in ("NETFOLD_SWITCH", "NETFOLD_ALGORITHM", "NETFOLD_TRANSPORT", "NETFOLD_WIRE_DTYPE"):
        os.environ.pop(name, None)
    os.environ.update(settings | ({"NETFOLD_SWITCH": switch} if "in-network" in way else {}))
    return backend


def main(one_host: str, folder: str, turns: int, settling: int, steps: int) -> None:
    torch.set_num_threads(1)
    rank, size, switch = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), os.environ["NETFOLD_SWITCH"]
    kept = json.loads(Path(one_host).read_text())
    times = [LayerTime(**each) for each in kept["times"]]
    recipe = recipe_of(kept["path"], size, settling + steps)
    data = make_data(recipe.data)
    few = replace(data, held_out=First(data.held_out, recipe.training.batch * size))
    store = dist.FileStore(f"{folder}/store", size)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for turn in range(turns):
        for way in WAYS if turn % 2 == 0 else reversed(WAYS):
            made = dist.PrefixStore(f"{turn}-{way}", store)
            backend = chosen(way, switch)
            dist.init_process_group(backend, store=made, rank=rank, world_size=size, timeout=timedelta(seconds=240))
            torch.manual_seed(0)
            ends = Ends()
            Trainer(recipe, model=timed(make_model(recipe.model), times), data=few, callbacks=[ends]).fit()
            seconds[way] += ends.between(settling)
            dist.destroy_process_group()
    if rank == 0:
        Path(folder, "seconds.json").write_text(json.dumps(seconds))


class Ends:
    """Listens for the ends of steps."""

    def __init__(self) -> None:
        self._at_s: list[float] = []

    def between(self, settling: int) -> list[float]:
        return [
            after - before for before, after in zip(self._at_s[settling - 1 :], self._at_s[settling:], strict=False)
        ]

    def on_start(self, event: Any) -> None: ...
    def on_step(self, event: Any) -> None:
        self._at_s.append(time.perf_counter())

    def on_evaluation(self, event: Any) -> None: ...
    def on_note(self, event: Any) -> None: ...
    def on_end(self, event: Any) -> None: ...


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
