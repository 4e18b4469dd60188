"""Measure each layer's weights, activations and messages on fake tensors: shapes and bytes without memory.

Tensor parallelism runs over torch's fake process group, and its collectives are recorded, for any plan of the model.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from netfold_plan.model import Pass
from netfold_train.data.examples import Batch
from netfold_train.dry_run.tracer import Ran, TracedPart, TraceMode, tensors
from netfold_train.models.model import Chain, Model, blocks_of
from netfold_train.parallel import context as context_module
from netfold_train.parallel.blocks import recompute, slow_operations
from netfold_train.parallel.context import ContextModule
from netfold_train.parallel.device import CPU
from netfold_train.parallel.embeddings import Embeddings
from netfold_train.parallel.experts import Experts
from netfold_train.parallel.mesh import Axis
from netfold_train.parallel.precision import DTYPES, Precision, keeps_statistics, needs_f32
from netfold_train.parallel.shards import axes, local
from netfold_train.parallel.tensor import cut_along
from netfold_train.recipe import Parallel

Shape = tuple[int, ...]
Recompute = Literal["none", "all", "selective"]
_NOTHING = Pass()


@dataclass(frozen=True)
class Routed:
    """A call of a module of experts."""

    experts: int
    size_bytes: int
    """Of the tokens of a microbatch, once for each expert."""
    again: bool
    """In a backward pass, which recomputes it: it has no gradients of its own."""


@dataclass(frozen=True)
class Exchange:
    """An all_to_all between ranks that share sequences."""

    of: str
    size_bytes: int
    """The bytes of one rank's tensor."""


@dataclass(frozen=True)
class Layer:
    """One layer on one rank, before ZeRO or `parallel.embeddings` and `parallel.experts` divide it."""

    name: str
    weights: tuple[Shape, ...]
    """Without tables, experts and batch norms."""
    norms: tuple[int, ...] = ()
    """Channels of each batch norm. It has a weight and a bias for each channel, always in f32."""
    tables: tuple[Shape, ...] = ()
    """[rows, width] of each embedding table that `parallel.embeddings` can divide."""
    experts: tuple[Shape, ...] = ()
    """Weights that `parallel.experts` can divide."""
    routed: tuple[Routed, ...] = ()
    """Of each call of a module of experts, for a microbatch."""
    attended: tuple[Exchange, ...] = ()
    """For a microbatch, where ranks share sequences (`parallel.context`)."""
    exact: tuple[tuple[Shape, ...], ...] = ()
    """Weights of each router and the like, which computes in f32 whatever the recipe says; also among `weights`."""
    cut_matrices: int = 0
    """The number of weights of two dimensions or more that tensor parallelism has cut."""
    saved_bytes: int | None = None
    """Kept from the forward to the backward pass, for one microbatch; None: could not be measured."""
    peak_bytes: int = 0
    """The most at one time, for one microbatch: more than `saved_bytes` where blocks are recomputed, one at a time."""
    handed_bytes: tuple[int, ...] = ()
    """Of each output."""
    handed_back_bytes: tuple[int, ...] = ()
    """Of each output that has a gradient."""
    forward: Pass = _NOTHING
    """Matrix products of a microbatch, and collectives inside the layer."""
    backward: Pass = _NOTHING
    """Also what is recomputed."""
    again: float = 0.0
    """Operations of `backward` in matrix products that repeat those of `forward`."""
    summed_bytes: tuple[int, ...] = ()
    """Of each gradient that is summed over the tensor axis after the last pass (`shards.settle`)."""

    def shapes(self, *, owned: Parallel | None = None) -> list[Shape]:
        """Of all parameters. owned: leave out the tables and experts that it divides."""
        channels = [(count,) for count in self.norms for _ in range(2)]
        tables, experts = self.tables, self.experts
        if owned is not None:
            tables = tables if owned.embeddings == "replicated" else ()
            experts = experts if owned.experts == "replicated" else ()
        return [*self.weights, *tables, *experts, *channels]

    @property
    def parameters(self) -> int:
        """Elements."""
        return sum(map(math.prod, self.shapes()))

    def owned_parameters(self, parallel: Parallel) -> int:
        """Elements that are divided among owners: of tables and experts."""
        return self.parameters - sum(map(math.prod, self.shapes(owned=parallel)))

    @property
    def operations(self) -> int:
        """Operations of a forward and a backward pass in matrix products, convolutions and attention.

        Without those that are recomputed: training measures its layers without them, too.
        """
        return round(self.forward.flops + self.backward.flops - self.again)


def measure(
    model: Model,
    fake: FakeTensorMode | None,
    example: Batch,
    *,
    samples: int,
    precision: Literal["f32", "bf16", "f16"] = "f32",
    tensor: int = 1,
    styles: Mapping[str, Any] | None = None,
    fsdp: bool = False,
    context: int = 1,
    recomputes: Recompute = "none",
) -> tuple[list[Layer], str]:
    """Measure the layers of `model` for passes of `samples` samples. Takes the model over, and cuts it in place.

    Returns the layers, and why activations and collectives could not be measured, or "". fake: the mode of the model's
    fake tensors. styles: the cuts of tensor parallelism. fsdp: ZeRO 2 or 3 keeps cut weights as DTensors. context:
    ranks that share sequences. recomputes: `training.recompute`; its memory is found by a pass with recomputation and
    one without. No process group may exist: with tensor > 1 this call makes one, and destroys it.
    """
    layers = list(model.module.layers.items()) if isinstance(model.module, Chain) else [("all", model.module)]
    whole = [_held(name, layer) for name, layer in layers]
    if fake is None:
        return whole, "the model cannot be made of fake tensors"
    try:
        with _mesh(tensor) as mesh, fake:
            if mesh is not None:
                cut_along(model.module, styles or {}, mesh)
            held = [_held(name, layer) for name, layer in layers]
            if fsdp:
                _lower(model.module, DTYPES[precision])
            batch = _batch(example, samples, context, DTYPES[precision] if fsdp else None)
            casts = Precision("f32" if fsdp else precision)
            plain = _run(model, layers, batch, casts, context)
            if recomputes == "none":
                return _measured(layers, held, plain, plain, ()), ""
            blocks = blocks_of(model) or {"": model.module}
            recompute(blocks.values(), "nothing" if recomputes == "all" else "products")
            kept = set(slow_operations()) if recomputes == "selective" else set()
            model.module.zero_grad()

            def keeps(path: str, operation: Any) -> bool:
                return operation in kept and _block(path, blocks) is not None

            again = _run(model, layers, batch, casts, context, keeps)
            return _measured(layers, held, again, plain, tuple(blocks)), ""
    except Exception as error:
        return whole, f"a pass of fake tensors failed: {type(error).__name__}: {str(error).splitlines()[0]}"


@contextlib.contextmanager
def _mesh(tensor: int) -> Iterator[DeviceMesh | None]:
    if tensor == 1:
        yield None
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=tensor)
    try:
        yield init_device_mesh("cpu", (tensor,))
    finally:
        dist.destroy_process_group()


def _lower(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast the parameters, except in modules with running statistics."""
    for part in module.modules():
        if not keeps_statistics(part):
            for name, parameter in part.named_parameters(recurse=False):
                setattr(part, name, nn.Parameter(parameter.detach().to(dtype)))


def _held(name: str, layer: nn.Module) -> Layer:
    norms = [part for part in layer.modules() if keeps_statistics(part)]
    tables, experts = (
        [weight for part in layer.modules() if isinstance(part, kind) for weight in part.parameters()]
        for kind in (Embeddings, Experts)
    )
    apart = {id(weight) for weight in (*tables, *experts, *(each for norm in norms for each in norm.parameters()))}
    weights = [weight for weight in layer.parameters() if id(weight) not in apart]
    return Layer(
        name,
        tuple(tuple(local(weight).shape) for weight in weights),
        tuple(norm.num_features for norm in norms),  # type: ignore[misc]
        tuple(tuple(table.shape) for table in tables),
        tuple(tuple(weight.shape) for weight in experts),
        exact=tuple(
            tuple(tuple(local(weight).shape) for weight in part.parameters())
            for part in layer.modules()
            if needs_f32(part) and not keeps_statistics(part)
        ),
        cut_matrices=sum(weight.ndim > 1 and bool(axes(weight)) for weight in weights),
    )


@dataclass(frozen=True)
class _Ran:
    """The record of a forward and a backward pass. layer: by name; module: of a call."""

    parts: list[tuple[str, TracedPart]]
    """(layer, part), in order."""
    outputs: Mapping[str, list[Tensor]]
    routed: list[tuple[nn.Module, Routed]]
    attended: list[tuple[nn.Module, Exchange]]


def _batch(example: Batch, samples: int, context: int, cast: torch.dtype | None) -> Batch:
    """Zeros in place of a rank's part of `samples` samples. cast: of inputs, as FSDP2 does."""

    def like(each: Tensor) -> Tensor:
        shape = list(each.shape[1:])
        return torch.zeros((samples, *(count // context for count in shape[:1]), *shape[1:]), dtype=each.dtype)

    made = [like(each) for each in example.tensors]
    if cast is not None:
        made[:-1] = [each.to(cast) if each.is_floating_point() else each for each in made[:-1]]
    return example.like(made)


def _run(
    model: Model,
    layers: Sequence[tuple[str, nn.Module]],
    batch: Batch,
    casts: Precision,
    context: int,
    keeps: Callable[[str, Any], bool] = lambda path, operation: False,
) -> _Ran:
    """Run a step. keeps: as of `TraceMode`."""
    outputs: dict[str, list[Tensor]] = {}
    watch = TraceMode(model.module, keeps)
    with contextlib.ExitStack() as inside:
        inside.enter_context(watch.hooked())
        routed, attended = inside.enter_context(_routed_evenly()), inside.enter_context(_attends_whole(context))
        for name, layer in layers:
            hook = layer.register_forward_hook(lambda *given, name=name: outputs.update({name: tensors(given[-1])}))
            inside.enter_context(hook)
        with casts.context(model.module, CPU):
            output = model.module(*batch.inputs, **batch.named)
        model.losses(output, batch.target).mean().backward()  # type: ignore[no-untyped-call]
    parts = []
    name = layers[0][0]
    for part in watch.seen:
        # A chain's own work belongs to the layer before, and so does the loss.
        path = part.module.split(".")
        name = path[1] if isinstance(model.module, Chain) and path[0] == "layers" else name
        parts.append((name, part))
    return _Ran(parts, outputs, routed, attended)


def _measured(
    layers: Sequence[tuple[str, nn.Module]], held: Sequence[Layer], ran: _Ran, plain: _Ran, blocks: Sequence[str]
) -> list[Layer]:
    """The layers with their measurements. plain: without recomputation. blocks: the paths of those recomputed."""
    whole: dict[str | None, int] = {}
    for _, part in plain.parts:
        block = _block(part.module, blocks)
        whole[block] = whole.get(block, 0) + part.kept_bytes
    found = []
    for layer, (name, module) in zip(held, layers, strict=True):
        parts, before = ([part for other, part in each.parts if other == name] for each in (ran, plain))
        modules, backward = set(module.modules()), _pass([part.backward for part in parts])
        saved, peak = _kept(parts, whole, blocks)
        found.append(
            replace(
                layer,
                saved_bytes=saved,
                peak_bytes=peak,
                handed_bytes=tuple(local(each).nbytes for each in ran.outputs[name]),
                handed_back_bytes=tuple(local(each).nbytes for each in ran.outputs[name] if each.requires_grad),
                forward=_pass([part.forward for part in parts]),
                backward=backward,
                again=backward.flops - _pass([part.backward for part in before]).flops,
                summed_bytes=_summed(module),
                attended=tuple(each for part, each in ran.attended if part in modules),
                routed=tuple(each for part, each in ran.routed if part in modules),
            )
        )
    return found


def _kept(parts: Sequence[TracedPart], whole: Mapping[str | None, int], blocks: Sequence[str]) -> tuple[int, int]:
    """Bytes from the forward to the backward pass of a layer, and the most at one time.

    While a block is recomputed it has all its activations, and the parts after it have freed theirs. whole: a block's
    bytes without recomputation, with those of its inputs that it needs.
    """
    saved = peak = 0
    for block, run in itertools.groupby(parts, lambda part: _block(part.module, blocks)):
        before = saved
        saved += sum(part.kept_bytes for part in run)
        peak = max(peak, saved, before + (whole[block] if block is not None else 0))
    return saved, peak


def _block(path: str, blocks: Iterable[str]) -> str | None:
    """The block that a module, by its path, is in."""
    return next((each for each in blocks if not each or path == each or path.startswith(f"{each}.")), None)


@contextlib.contextmanager
def _routed_evenly() -> Iterator[list[tuple[nn.Module, Routed]]]:
    """Inside, every expert gets equally many tokens, because fake tensors do not say which experts they choose.

    Yields a list that gets each call.
    """
    calls: list[tuple[nn.Module, Routed]] = []

    def forward(self: Experts, tokens: Tensor, chosen: Tensor) -> Tensor:
        count = len(self.experts)
        calls.append((self, Routed(count, tokens.nbytes, _in_backward())))
        return self._computed(tokens, [len(part) for part in torch.arange(len(tokens)).tensor_split(count)])

    with mock.patch.object(Experts, "forward", forward):
        yield calls


@contextlib.contextmanager
def _attends_whole(ranks: int) -> Iterator[list[tuple[nn.Module, Exchange]]]:
    """In the block, layers run as on the first of `ranks` ranks that share sequences. No rank sends anything.

    Each exchange returns a copy of its own input, which has the shape of the other ranks' values. Yields a list of the
    exchanges: each exchange of a forward pass, and the exchange of its backward pass.
    """
    calls: list[tuple[nn.Module, Exchange]] = []
    exchange = ContextModule.exchange_heads
    running: list[nn.Module] = []

    def exchange_heads(self: ContextModule, *given: Any) -> Tensor:
        running[:] = [self, self]
        return exchange(self, *given)

    def all_to_all(sent: Tensor, *_: Any) -> Tensor:
        of = "queries, keys and values" if len(running) == 2 else "results of attention"
        made = [of] if _in_backward() else [of, f"gradients of {of}"]
        part = running.pop()
        calls.extend((part, Exchange(each, sent.nbytes)) for each in made)
        return sent.clone()

    def gather(values: Tensor, axis: Axis) -> Tensor:
        return torch.cat([values] * axis.size, 1)

    if ranks == 1:
        yield calls
        return
    group: Any = None
    with (
        mock.patch.object(ContextModule, "exchange_heads", exchange_heads),
        mock.patch.object(ContextModule, "context", Axis("context", 0, ranks, group)),
        mock.patch.object(context_module, "all_to_all_single", all_to_all),
        mock.patch.object(context_module, "gather_tokens", gather),
    ):
        yield calls


def _in_backward() -> bool:
    """Whether a backward pass runs: a layer's forward pass is then a recomputation."""
    return torch._C._current_autograd_node() is not None


def _pass(ran: Sequence[Ran]) -> Pass:
    return Pass(
        tuple(matmul for each in ran for matmul in each.matmuls),
        collectives=tuple(call for each in ran for call in each.collectives),
    )


def _summed(layer: nn.Module) -> tuple[int, ...]:
    """The bytes of each gradient that is a term of a sum over the tensor axis."""
    gradients = [parameter.grad for parameter in layer.parameters()]
    return tuple(
        local(gradient).nbytes
        for gradient in gradients
        if isinstance(gradient, DTensor) and any(place.is_partial() for place in gradient.placements)
    )
