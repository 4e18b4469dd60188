"""Bytes a parameter that a rank holds in mixed precision with Adam, against ZeRO's formulas (Rajbhandari et al. 2020):

    .venv/bin/python lab/bench/train_memory.py

Ranks train a GPT of some million parameters for a few steps in bf16. The script counts the storages of parameters,
gradients and optimizer states, each once: after a step, and at the end of the next forward pass. The second witness is
by how much the process's own memory has grown since a tiny model was trained in the same way, freed memory given back;
this has activations and the engine's buffers in it too. The rank that holds most is shown.
"""

from __future__ import annotations

import ctypes
import gc
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import driver
from driver import Place, Rank

from netfold_train import Recipe, Trainer
from netfold_train.callbacks.events import Callback
from netfold_train.data import make_data

RANKS = (1, 2, 4)
MODEL: dict[str, Any] = {"name": "gpt", "width": 256, "heads": 4, "layers": 6, "context": 16}
TINY = {**MODEL, "width": 16, "layers": 1}
GPT2_RANKS = 4
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


class Held(Callback):
    """Counts what a rank holds: after a step, and when a forward pass of training has ended."""

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
        if not self._trainer.recipe.parallel.zero:
            # DDP's buckets, of which gradients are views, stay when `zero_grad` drops the views.
            self._buckets = storages(parameter.grad for _, parameter in self._trainer.replica.named_parameters())

    def _forward(self, module: Any, inputs: Any, output: Any) -> None:
        if module.training:
            self.after_forward = sum({**self._buckets, **self._storages()}.values())

    def _storages(self) -> dict[int, int]:
        optimizer = self._trainer.optimizer
        # What the module has now, which may be gathered, and what the optimizer steps on.
        parameters = [*self._trainer.replica.modules[0].parameters()]
        parameters += [parameter for group in optimizer.param_groups for parameter in group["params"]]
        states = (value for state in optimizer.state.values() for value in state.values())
        return storages([*parameters, *(parameter.grad for parameter in parameters), *states])


def storages(tensors: Iterable[Any]) -> dict[int, int]:
    """Bytes by address, of this rank's parts."""
    from torch.distributed.tensor import DTensor

    found = {}
    for tensor in tensors:
        if tensor is not None:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            found[local.untyped_storage().data_ptr()] = local.untyped_storage().nbytes()
    return found


def own_bytes() -> int:
    """The process's memory that belongs to no file and is not shared."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["RssAnon"].split()[0]) * 1024


def train(me: Rank) -> None:
    """A rank. An order trains a model: parameters; bytes per parameter after a step, after a forward pass, grown by."""
    from timed_model import few_held_out

    def run(model: dict[str, Any], zero: int, precision: str = "bf16") -> tuple[int, float, float, float]:
        training = {**RECIPE["training"], "precision": precision}
        parallel = {"data": me.size, "zero": zero}
        recipe = Recipe.model_validate({**RECIPE, "model": model, "training": training, "parallel": parallel})
        callback = Held()
        data = few_held_out(make_data(recipe.data), recipe.training.batch)
        trainer = Trainer(recipe, data=data, callbacks=[callback])
        callback.watch(trainer)
        parameters = sum(parameter.numel() for parameter in trainer.replica.modules[0].parameters())
        trainer.fit()
        counted = (callback.after_step, callback.after_forward, callback.grown)
        after, forward, grown = (count / parameters for count in counted)
        return parameters, after, forward, grown

    with me.torch_group():
        me.serve(run)


def of_gpt2() -> list[list[Any]]:
    """GPT-2 of transformers, with random weights, in f32: a row for ZeRO 0 and 3."""
    from transformers import GPT2Config

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        GPT2Config().save_pretrained(folder)
        model = {"name": "hf", "path": folder, "pretrained": False}
        for zero, share in ((0, 16.0), (3, 16.0 / GPT2_RANKS)):
            with driver.ranks_at(Place(GPT2_RANKS), train) as ranks:
                ranks.ask(TINY, zero)
                parameters, after, _, grown = max(ranks.ask(model, zero, "f32"), key=lambda found: found[1])
            rows.append([zero, f"{share * parameters / 1e6:.0f}", f"{after * parameters / 1e6:.0f}",
                         f"{after / share - 1:+.1%}", f"{grown * parameters / 1e6:.0f}"])  # fmt: skip
    return rows


def train_memory() -> str:
    """Memory a rank: measured against ZeRO's formulas"""
    rows, above, parameters = [], [], 0
    for size in RANKS:
        for zero, (formula, expected) in enumerate(PAPER):
            if size == 1 and zero:
                continue
            with driver.ranks_at(Place(size), train) as ranks:
                ranks.ask(TINY, zero)
                parameters, after, forward, grown = max(ranks.ask(MODEL, zero), key=lambda found: found[1])
            above.append(grown - after)
            paper = f"{formula} = {expected(size):.2f}"
            rows.append([size, zero, paper, f"{after:.2f}", f"{forward:.2f}", f"{grown:.1f}"])
    least, most = min(above), max(above)
    gpt2 = of_gpt2()
    return f"""Bytes a parameter, GPT of {parameters / 1e6:.2f} million parameters, bf16, AdamW; the rank that holds
most. The first lines of the script say what is counted. Load does not change what is counted.

{driver.table("ranks d | ZeRO | paper | after a step | end of forward | process grew by", rows)}

ZeRO 0 holds f32 weights, gradients and moments. From the forward to the backward pass there are autocast's bf16 copies.

ZeRO 1 and 2 are not the paper's: FSDP2 has no bf16 weights beside f32 ones. Of its rows a rank holds 4 bytes of weight,
4 of gradient (reduced in bf16, kept in f32) and 8 of moments: 16/d between steps, with ZeRO 1 and 2 as with 3. The
paper's 2 whole bytes of bf16 weight exist from the forward to the backward pass alone, when there are no gradients:
2 + 12/d. In the
backward pass each layer's gathered weights go as its gradients come: a rank never holds more than 2 + 16/d and one
layer's whole gradients. ZeRO 3 has one layer gathered at a time, and none at the end of the forward pass: 12/d.

The processes grew by {least:.1f} to {most:.1f} bytes per parameter more than was counted, some
{least * parameters / 1e6:.0f} to {most * parameters / 1e6:.0f} MB: activations, the engine's and FSDP2's buffers.

GPT-2 of transformers (12 layers of 768, 124 million parameters), f32, AdamW, {GPT2_RANKS} ranks, samples of 16
tokens; MB a rank. The formula: 16 bytes a parameter for weight, gradient and moments, over the ranks that divide them.

{driver.table("ZeRO | formula | counted after a step | off by | process grew by", gpt2)}
"""


if __name__ == "__main__":
    driver.run(train_memory)
