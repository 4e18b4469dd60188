"""Low-communication data parallel: sites train independently, and use their mean change every k steps as a gradient.

DiLoCo: Douillard et al. 2023, algorithm 1. With lr 1 and momentum 0 it is local SGD (Stich 2019). Fragments and
overlap: Streaming DiLoCo, Douillard et al. 2025, algorithm 2. There a fragment that arrives replaces a part alpha of
the weights. Here its change is added to them, so that each local step counts once, without another constant.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from netfold_train.models.model import Replica
from netfold_train.parallel.mesh import Mesh, in_runs, own_group
from netfold_train.parallel.shards import exchanged, local
from netfold_train.recipe import DiLoCo

if TYPE_CHECKING:
    from netfold.torch.operations import Operations

# The largest message: few calls, without a second copy of the whole model.
BUFFER_BYTES = 64 << 20


class DiLoCoRounds:
    """Exchange the sites' changes of weights once in every round of `every` steps, fragment by fragment.

    A fragment's gradient is its outer weights minus the mean of the sites' weights. SGD with Nesterov momentum then
    computes the next outer weights, the same on all ranks. With one fragment and no overlap, all ranks' weights are the
    outer weights at the end of every round. Otherwise a site is ahead of them by its own steps since it last sent a
    fragment.

    A site's ranks have equal gradients, and so equal weights. Each of them exchanges an equal part of a fragment with
    its counterparts on other sites. The ranks of the site then gather the means. Each rank keeps its own optimizer
    state; floating-point buffers (batch norm's) are averaged at the end of a round.

    Holds two copies of this rank's weights: the outer weights, and the momentum; of fragments under way two more; with
    i8 on the wire the rounding errors of this rank's part.
    """

    def __init__(self, replica: Replica, asked: DiLoCo, mesh: Mesh) -> None:
        """Broadcast the weights of the first data-parallel rank. Collective over the world.

        mesh: made with `asked`. Raises ValueError if the wire format needs netfold, and the mesh has another backend.
        """
        assert mesh.between is not None
        self._modules, self._every, self._overlap = replica.modules, asked.every, asked.overlap
        self._data, self._site, self._sites = mesh.data, mesh.site, mesh.between.size
        self._group, self._feeds_back = mesh.between.group, None
        if asked.wire != "f32":
            self._group, operations = _wire_group(mesh, asked.wire)
            self._feeds_back = operations if asked.wire == "i8" else None
        self._rounding: dict[Tensor, Tensor] = {}
        """For the first outer weight of each run: the rounding errors of this rank's part of the run."""
        parameters = [held for _, held in replica.named_parameters()]
        weights = [local(held.detach()) for held in parameters]
        for weight in weights:
            dist.broadcast(weight, group=self._data.group, group_src=0)
        # The outer weights -> the weights.
        self._weights = {weight.clone(): weight for weight in weights}
        last = asked.every - asked.overlap
        self._sends = {
            -(-(number + 1) * last // asked.fragments): in_runs(fragment, BUFFER_BYTES)
            for number, fragment in enumerate(in_fragments(list(self._weights), asked.fragments))
        }
        """Step of the round -> the runs of outer weights that are sent after it, one message each."""
        self._under_way: dict[int, list[_Exchange]] = {}
        """By the step of the round after which they are merged."""
        self._outer = torch.optim.SGD(list(self._weights), asked.lr, asked.momentum, nesterov=asked.momentum > 0)
        self.state: dict[Tensor, dict[str, Any]] = {
            held: self._outer.state[start] for held, start in zip(parameters, self._weights, strict=True)
        }
        """Of the outer optimizer, for each parameter."""
        self.ahead: dict[Tensor, dict[str, Tensor]] = {}
        """For each parameter: inside `common` this site's own weight, if sites differ between rounds."""
        self._streams = asked.fragments > 1 or asked.overlap > 0
        if self._streams:
            self.ahead = {held: {"weight": start} for held, start in zip(parameters, self._weights, strict=True)}
        self.between = True
        """No fragment is under way, and none is due before the next step."""
        self.shared = True
        """All ranks' weights are the outer weights."""

    @torch.no_grad()
    def end_step(self, number: int) -> None:
        """End step `number` of the job (from 1), taken or left out: merge and send the fragments that are due.

        Waits for other sites only if a fragment is merged that has not arrived.
        """
        self.between = self.shared = False
        place = (number - 1) % self._every + 1
        # Without overlap one run at a time, so that there are few gradients at a time.
        for starts in self._sends.get(place, ()):
            exchange = self._send(starts, keep=self._overlap > 0)
            if self._overlap:
                self._under_way.setdefault(place + self._overlap, []).append(exchange)
            else:
                self._merge(exchange)
        for exchange in self._under_way.pop(place, ()):
            self._merge(exchange)
        if place == self._every:
            self._average_buffers()
            self.between, self.shared = True, not self._streams

    def settle(self) -> None:
        """End an unfinished round, however short. Collective over the data axis."""
        if not self.between:
            self.finish()

    @torch.no_grad()
    def finish(self) -> None:
        """Make all ranks' weights equal. Collective over the data axis.

        With fragments or overlap they become the mean of the sites' weights: another outer step would apply the
        momentum of fragments that were sent shortly before once more. Otherwise an unfinished round ends early.
        """
        if self.shared:
            return
        for place in sorted(self._under_way):
            for exchange in self._under_way.pop(place):
                self._merge(exchange)
        for runs in self._sends.values():
            for starts in runs:
                self._merge(self._send(starts), mean=self._streams)
        self._average_buffers()
        self.between = self.shared = True

    def common(self) -> contextlib.AbstractContextManager[None]:
        """Inside, all ranks' weights are the outer weights. Ends an unfinished round; else no communication.

        Cost: two copies of the weights, if sites differ between rounds.
        """
        self.settle()
        return exchanged([] if self.shared else list(self._weights.items()))

    @torch.no_grad()
    def begin(self) -> None:
        """Begin a round with the present weights, after they, `state` and `ahead` were loaded from a checkpoint.

        Rounding errors are 0 again.
        """
        self._rounding.clear()
        for of_weight in self.state.values():
            # A checkpoint has parts of whole tensors; the outer optimizer steps on plain ones.
            of_weight.update({key: local(value) for key, value in of_weight.items() if value is not None})
        for start, weight in self._weights.items():
            start.copy_(weight)
        for (held, of_held), (start, weight) in zip(self.ahead.items(), self._weights.items(), strict=False):
            # A checkpoint of rounds without fragments has none.
            if "weight" in of_held:
                weight.copy_(local(of_held["weight"]))
            self.ahead[held] = {"weight": start}
        self.between, self.shared = True, not self._streams

    def _send(self, starts: Sequence[Tensor], *, keep: bool = False) -> _Exchange:
        """Begin to average the sites' changes of a run. keep: the weights will change before the merge."""
        flat: Tensor = _flatten_dense_tensors(  # type: ignore[no-untyped-call]
            [start - self._weights[start] for start in starts]
        )
        ranks = self._site.size
        if ranks > 1:
            flat = torch.cat([flat, flat.new_zeros(-len(flat) % ranks)])
        part = flat.view(ranks, -1)[self._site.rank]
        sent = [self._weights[start].clone() for start in starts] if keep else None
        if self._feeds_back is not None and part.dtype is torch.float32:
            rounding = self._rounding.setdefault(starts[0], torch.zeros_like(part))
            return _Exchange(starts, flat, part, sent, self._feeds_back.average(part, rounding), divisor=1)
        work = dist.all_reduce(part, group=self._group, async_op=True)
        return _Exchange(starts, flat, part, sent, work, divisor=self._sites)

    def _merge(self, exchange: _Exchange, *, mean: bool = False) -> None:
        """Wait for the mean change, take the outer step, and bring its result into the weights.

        mean: instead of the outer step take the mean of the sites' weights. Collective over the site.
        """
        exchange.done.wait()
        if exchange.divisor > 1:
            exchange.part.div_(exchange.divisor)
        if self._site.size > 1:
            dist.all_gather_into_tensor(exchange.flat, exchange.part.clone(), group=self._site.group)
        starts = exchange.starts
        gradients = _unflatten_dense_tensors(exchange.flat, starts)  # type: ignore[no-untyped-call]
        if mean:
            torch._foreach_sub_(list(starts), list(gradients))
        else:
            # SGD leaves out tensors without a gradient.
            for start, gradient in zip(starts, gradients, strict=True):
                start.grad = gradient
            self._outer.step()
            self._outer.zero_grad()
        for number, start in enumerate(starts):
            if exchange.sent is None:
                self._weights[start].copy_(start)
            else:
                # Keep the steps that were taken since.
                self._weights[start].add_(start - exchange.sent[number])

    def _average_buffers(self) -> None:
        for module in self._modules:
            for held in module.buffers():
                if held.is_floating_point():
                    dist.all_reduce(held, group=self._data.group)
                    held /= self._data.size


@dataclass(frozen=True)
class _Exchange:
    """A run of outer weights whose mean change is being computed."""

    starts: Sequence[Tensor]
    flat: Tensor
    """The changes one after another, and zeros up to a multiple of the site's ranks."""
    part: Tensor
    """The part of `flat` that this rank exchanges: its own changes, then their sum or mean."""
    sent: list[Tensor] | None
    """The weights that the changes led to, if training goes on meanwhile."""
    done: Any
    divisor: int
    """Of the sum in `part`; 1: it is the mean."""


def in_fragments(weights: Sequence[Tensor], count: int) -> list[list[Tensor]]:
    """Cut the list into `count` runs of about equal bytes. A run may be empty."""
    fragments: list[list[Tensor]] = [[] for _ in range(count)]
    total, before = sum(weight.nbytes for weight in weights), 0
    for weight in weights:
        fragments[(2 * before + weight.nbytes) * count // (2 * total) if weight.nbytes else 0].append(weight)
        before += weight.nbytes
    return fragments


def _wire_group(mesh: Mesh, wire: str) -> tuple[dist.ProcessGroup, Operations]:
    """A group of this rank's counterparts that sends f32 numbers as `wire`. Collective over the world."""
    # A job of another backend loads nothing native.
    from netfold.torch.operations import operations_of

    assert mesh.between is not None
    there = operations_of(mesh.between.group)
    if there is None:
        raise ValueError(f"diloco.wire is {wire!r}, which no backend but netfold can send; set 'f32'")
    group = own_group(
        mesh.counterparts(),
        timeout=timedelta(seconds=there.netfold.timeout_s),
        backend="netfold",
        pg_options=replace(there.netfold.options, wire_dtype=wire),
        group_desc=f"changes as {wire}",
    )
    operations = operations_of(group)
    assert operations is not None
    return group, operations
