"""Bytes a parameter that a rank holds in mixed precision with Adam, against ZeRO's formulas (Rajbhandari et al. 2020):

    .venv/bin/python bench/train_memory.py

Ranks train a GPT of some million parameters for a few steps in bf16. Counted are the storages that parameters,
gradients and optimizer states have, each once: after a step, and at the end of the next forward pass. The second
witness is by how much the process's own memory has grown since a tiny model was trained in the same way, freed memory
given back; that has activations and the engine's buffers in it too. The rank that holds most is shown.
Writes bench/results/train_memory.md.
"""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import os
import sys
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from netfold.bench.machine import spoken

RANKS = (1, 2, 4)
MODEL: dict[str, Any] = {"name": "gpt", "width": 256, "heads": 4, "layers": 6, "context": 16}
TINY = {**MODEL, "width": 16, "layers": 1}
RECIPE: dict[str, Any] = {
    "data": {"name": "source", "context": 16},
    "training": {"steps": 3, "batch": 4, "precision": "bf16"},
    "optimizer": {"name": "adamw"},
}
PAPER: tuple[tuple[str, Callable[[int], float]], ...] = (
    ("16", lambda ranks: 16),
    ("4 + 12/d", lambda ranks: 4 + 12 / ranks),
    ("2 + 14/d", lambda ranks: 2 + 14 / ranks),
    ("16/d", lambda ranks: 16 / ranks),
)
RESULT = Path(__file__).parent / "results" / "train_memory.md"
DEADLINE_S = 300.0


class Held:
    """A listener that counts what a rank holds: after a step, and when a forward pass of training has ended."""

    def __init__(self) -> None:
        self.after_step = self.after_forward = self.grown = 0
        self._buckets: dict[int, int] = {}
        self.before = own_bytes()

    def watch(self, trainer: Any) -> None:
        self._trainer = trainer
        trainer.replica.modules[0].register_forward_hook(self._forward)

    def on_step(self, event: Any) -> None:
        found = self._storages()
        self.after_step, self.grown = sum(found.values()), own_bytes() - self.before
        if self._trainer.recipe.parallel.zero < 2:
            # DDP's buckets, which gradients are views of, stay when `zero_grad` lets go of the views.
            self._buckets = storages(parameter.grad for _, parameter in self._trainer.replica.named_parameters())

    def _forward(self, module: Any, inputs: Any, output: Any) -> None:
        if module.training:
            self.after_forward = sum({**self._buckets, **self._storages()}.values())

    def _storages(self) -> dict[int, int]:
        from netfold.train.optimizers import local_optimizer

        optimizer = local_optimizer(self._trainer.optimizer)
        # What the module has now, which may be gathered, and what the optimizer steps on.
        parameters = [*self._trainer.replica.modules[0].parameters()]
        parameters += [parameter for group in optimizer.param_groups for parameter in group["params"]]
        states = (value for state in optimizer.state.values() for value in state.values())
        return storages([*parameters, *(parameter.grad for parameter in parameters), *states])

    def on_start(self, event: Any) -> None: ...
    def on_evaluation(self, event: Any) -> None: ...
    def on_note(self, event: Any) -> None: ...
    def on_end(self, event: Any) -> None: ...


class Few:
    """So many of some examples: what is measured on them does not matter here."""

    def __init__(self, examples: Any, count: int) -> None:
        self.batch, self._count = examples.batch, count

    def __len__(self) -> int:
        return self._count


def storages(tensors: Iterable[Any]) -> dict[int, int]:
    """Address -> bytes, of this rank's parts."""
    from torch.distributed.tensor import DTensor

    found = {}
    for tensor in tensors:
        if tensor is not None:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            found[local.untyped_storage().data_ptr()] = local.untyped_storage().nbytes()
    return found


def own_bytes() -> int:
    """The process's memory that is no file's and nobody else's."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["RssAnon"].split()[0]) * 1024


def held(rank: int, ranks: int, zero: int, folder: str) -> tuple[int, float, float, float]:
    """Parameters; bytes a parameter after a step, at the end of a forward pass, and that the process has grown by."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("netfold", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    try:
        held_by(TINY, ranks, zero)
        return held_by(MODEL, ranks, zero)
    finally:
        dist.destroy_process_group()


def held_by(model: dict[str, Any], ranks: int, zero: int) -> tuple[int, float, float, float]:
    from netfold.train import Recipe, Trainer
    from netfold.train.datasets import make_data

    recipe = Recipe.model_validate({**RECIPE, "model": model, "parallel": {"data": ranks, "zero": zero}})
    data = make_data(recipe.data)
    listener = Held()
    data = dataclasses.replace(data, held_out=Few(data.held_out, recipe.training.batch))
    trainer = Trainer(recipe, data=data, callbacks=[listener])
    listener.watch(trainer)
    parameters = sum(parameter.numel() for parameter in trainer.replica.modules[0].parameters())
    trainer.fit()
    return (
        parameters,
        listener.after_step / parameters,
        listener.after_forward / parameters,
        listener.grown / parameters,
    )


def measured(ranks: int, zero: int) -> tuple[int, float, float, float]:
    """Of the rank that holds most after a step."""
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(ranks, mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(held, rank, ranks, zero, folder) for rank in range(ranks)]
        return max((future.result(DEADLINE_S) for future in futures), key=lambda found: found[1])


def main() -> None:
    load = os.getloadavg()[0]
    rows, above, parameters = [], [], 0
    for ranks in RANKS:
        for zero, (formula, expected) in enumerate(PAPER):
            if ranks == 1 and zero:
                continue
            parameters, after, forward, grown = measured(ranks, zero)
            above.append(grown - after)
            rows.append(
                f"| {ranks} | {zero} | {formula} = {expected(ranks):.2f} | {after:.2f} | {forward:.2f} | {grown:.1f} |"
            )
            print(rows[-1], file=sys.stderr, flush=True)
    table = "\n".join(
        [
            "| ranks d | ZeRO | paper | after a step | end of forward | process grew by |",
            "|---|---|---|---|---|---|",
            *rows,
        ]
    )
    least, most = min(above), max(above)
    least_mb, most_mb = least * parameters / 1e6, most * parameters / 1e6
    RESULT.write_text(
        f"""# Memory a rank: measured against ZeRO's formulas

`.venv/bin/python bench/train_memory.py`: bytes a parameter, GPT of {parameters / 1e6:.2f} million parameters, bf16,
AdamW; the rank that holds most. What is counted is in the script's first lines.

{table}

ZeRO 0 and 1 are the paper's: 2 bytes of bf16 weight, 2 of gradient, 12 of f32 weight and moments, which ZeRO 1 shares
out as whole parameters: so the fullest rank is a little above the mean.

ZeRO 2 is not: FSDP2 has no bf16 weights beside f32 ones. Of its rows a rank holds 4 bytes of weight, 4 of gradient
(reduced in bf16, kept in f32) and 8 of moments: 16/d between steps, with ZeRO 2 as with 3. The paper's 2 whole bytes of
bf16 weight are there from the forward to the backward pass alone, when there are no gradients: 2 + 12/d. In the
backward pass each layer's gathered weights go as its gradients come: it is never above 2 + 16/d and one layer's whole
gradients. ZeRO 3 has one layer gathered at a time, and none at the end of the forward pass: 12/d.

The processes grew by {least:.1f} to {most:.1f} bytes a parameter more than was counted, some
{least_mb:.0f} to {most_mb:.0f} MB:
activations, the engine's and FSDP2's buffers.
{spoken((load, os.getloadavg()[0]))} Load does not change what is counted.
"""
    )


if __name__ == "__main__":
    main()
