"""Memory of a rank while it makes its part of a model of 7 billion parameters, against its share:

    .venv/bin/python lab/bench/meta_memory.py

The ranks of a world of 4 make their parts one after another, each in a process of its own over torch's fake process
group, because 4 parts in f32 need 27 GB together. No step is taken. A rank does what `netfold train` does: the recipe's
model, cut by ZeRO 3. The peak is the kernel's (VmHWM), less the memory that the process had before; a tiny model was
made in the same way by then. `whole`: every rank makes the model before it is cut, as for a factory that cannot be
recorded; on a model of fewer layers, which fits.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import driver
from driver import Place, Rank
from train_memory import own_bytes, storages

RANKS = 4
GPT: dict[str, Any] = {"name": "gpt", "vocabulary": 32000, "context": 2048, "width": 4096, "heads": 32}
TINY = {"name": "gpt", "width": 16, "layers": 1}
GB = 1e9


def make_parts(me: Rank) -> None:
    """A process. An order makes a rank's part of a model; returns what `row` takes."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from netfold_train import Recipe
    from netfold_train.models import make_model
    from netfold_train.models.deferred import record
    from netfold_train.parallel import parallelise
    from netfold_train.parallel.mesh import Mesh

    def run(rank: int, model: dict[str, Any], whole: bool) -> tuple[int, int, int, int, int, float]:
        parts = {"data": RANKS, "zero": 3}
        recipe = Recipe.model_validate(
            {"model": model, "data": {"name": "source"}, "training": {"steps": 1, "batch": RANKS}, "parallel": parts}
        )
        if not dist.is_initialized():
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=RANKS)
        mesh = Mesh(recipe.parallel, torch.device("cpu"))
        before = own_bytes()
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        at_start = status_bytes("VmRSS")
        began_s = time.perf_counter()
        made, deferred = (make_model(recipe.model), None) if whole else record(lambda: make_model(recipe.model), 0)
        parameters = [each.nbytes for each in made.module.parameters()]
        replica = parallelise(made, recipe, mesh, None, deferred)
        seconds = time.perf_counter() - began_s
        peak = status_bytes("VmHWM") - at_start
        share = sum(storages(parameter for _, parameter in replica.named_parameters()).values())
        return sum(parameters) // 4, share, max(parameters), peak, own_bytes() - before, seconds

    me.serve(run)


def status_bytes(key: str) -> int:
    """Of this process, as the kernel counts them."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status[key].split()[0]) * 1024


def meta_memory(layers: int = 32, whole_layers: int = 4) -> str:
    """Memory a rank: making its part of a 7B model"""
    rows, above = [], []
    for count, whole, ranks in ((layers, False, range(RANKS)), (whole_layers, False, (0,)), (whole_layers, True, (0,))):
        for rank in ranks:
            with driver.ranks_at(Place(1), make_parts) as started:
                started.ask(rank, TINY, whole)
                parameters, share, largest, peak, held, seconds = started.ask(rank, {**GPT, "layers": count}, whole)[0]
            if not whole:
                above.append((peak - share - largest) / GB)
            rows.append(
                [
                    f"{parameters / 1e9:.2f}e9, {'whole first' if whole else 'deferred'}",
                    rank,
                    *(f"{each / GB:.2f}" for each in (4 * parameters, share, largest, share + largest, peak, held)),
                    f"{seconds:.0f}",
                ]
            )
    heads = "parameters | rank | model | share | largest | share + largest | peak | held | s"
    return f"""GB (1e9 bytes). A GPT of {layers} layers, width {GPT["width"]}, vocabulary {GPT["vocabulary"]}, f32;
ZeRO 3 over {RANKS} ranks, one rank at a time over torch's fake process group (the first lines of the script say how).

{driver.table(heads, rows)}

share: the rank's rows of all parameters. largest: the largest parameter, whole. peak: the largest memory of the process
while the part is made, more than before. held: afterwards, more than before. Of deferred models, the peak is share +
largest and {min(above):.2f} to {max(above):.2f} GB."""


if __name__ == "__main__":
    driver.run(meta_memory)
