"""This rank's part of a model, made ready to train: what `parallelise` returns and the trainer drives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from torch import Tensor, nn

from netfold.train.examples import Batch


class Replica(Protocol):
    """What a rank holds of the model, however it was cut."""

    modules: tuple[nn.Module, ...]
    """One a stage that is held here. Parameters of all ranks' modules together have the names of the whole model's."""

    notes: list[str]
    """What it has chosen and why, for people. Who tells them empties the list."""

    def gradients(self, batch: Batch, scale: float = 1.0) -> Tensor | None:
        """Forward and backward of this rank's share of a batch; leaves in every parameter's `grad` the mean over the
        global batch (under `diloco`: over this rank's share) times `scale`, in parts of the data as the recipe says.

        Returns the mean loss of the share, not scaled, f32, detached; None on ranks that have no part in computing it
        (all stages but the last).
        """
        ...

    def outputs(self, batch: Batch) -> Tensor | None:
        """The model's outputs for a batch as large as those it trains on, without gradients; None but on the last
        stage. The modules are in evaluation mode while it runs, and in training mode before and after."""
        ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Every parameter here, under its name in the whole model."""
        ...

    def as_shard(self, name: str, tensor: Tensor) -> Tensor:
        """`tensor`, which has the shape that parameter `name` has here (itself, its momentum), as the part of the whole
        that it is: a DTensor that says which; itself where it is the whole, or a DTensor already."""
        ...
