"""Models made without memory: their values, their parts on ranks, and factories that cannot be recorded."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from netfold_train import Model
from netfold_train.models import make_model
from netfold_train.models.deferred import Deferred, materialise, materialised, record
from netfold_train.recipe import Factory
from netfold_train.zoo.models.linear import class_loss

OURS: list[dict[str, Any]] = [
    {"name": "gpt", "width": 16, "layers": 2, "context": 8},
    {"name": "bert", "width": 16, "layers": 1, "context": 8},
    {"name": "dlrm", "numbers": 3, "rows": [5, 70]},
    {"name": "edsr", "features": 8, "blocks": 2},
    {"name": "edsr", "features": 8, "blocks": 2, "scale": 4, "residual_scale": 0.1},
    {"name": "linear-stack", "widths": [8, 16, 3]},
    {"name": "resnet18", "stem": "small"},
]
CONFIGS: dict[str, Callable[[Any], Any]] = {
    "gpt2": lambda transformers: transformers.GPT2Config(
        n_layer=2, n_embd=16, n_head=2, vocab_size=90, bos_token_id=1, eos_token_id=2
    ),
    "llama": lambda transformers: transformers.LlamaConfig(
        num_hidden_layers=2, hidden_size=16, num_attention_heads=2, intermediate_size=24, vocab_size=90
    ),
}


def model(module: nn.Module) -> Model:
    return Model(module, class_loss)


def made(make: Callable[[], Model], seed: int = 0) -> Model:
    found, deferred = record(make, seed)
    assert not deferred.note
    materialise(found.module, deferred)
    return found


def state(module: nn.Module) -> dict[str, Tensor]:
    parameters = module.named_parameters(remove_duplicate=False)
    return dict(parameters) | dict(module.named_buffers(remove_duplicate=False))


class SameDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Every random operation begins at the same state of torch's generator."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            torch.default_generator.manual_seed(7)
        return func(*args, **(kwargs or {}))


def check_equal_to_the_factory(make: Callable[[], Model]) -> Model:
    """The replay does what the factory does: the same bits, once their random operations draw the same numbers."""
    with SameDraws():
        real = state(make().module)
    found, deferred = record(make, 0)
    assert not deferred.note
    deferred._draws = dict.fromkeys(deferred._draws, 7)
    materialise(found.module, deferred)
    replayed = state(found.module)
    assert list(replayed) == list(real)
    for name, value in real.items():
        other = replayed[name]
        assert type(other) is type(value)
        assert (other.dtype, other.shape, other.stride()) == (value.dtype, value.shape, value.stride()), name
        assert other.requires_grad == value.requires_grad
        assert torch.equal(other, value), name
    return found


@pytest.mark.parametrize("asked", OURS, ids=lambda asked: asked["name"])
def test_our_models_get_the_values_of_their_factories(asked: dict[str, Any]) -> None:
    check_equal_to_the_factory(lambda: make_model(Factory.model_validate(asked)))


def weights(change: Callable[[Tensor], object]) -> Callable[[], Model]:
    def make() -> Model:
        layer = nn.Linear(12, 10)
        with torch.no_grad():
            change(layer.weight)
        return model(layer)

    return make


@pytest.mark.parametrize(
    "change",
    [
        nn.init.orthogonal_,
        nn.init.eye_,
        nn.init.xavier_normal_,
        lambda weight: nn.init.sparse_(weight, 0.5),
        lambda weight: nn.init.trunc_normal_(weight, std=0.02),
        lambda weight: weight.copy_(torch.tensor([[float(n)] for n in range(10)])),
        lambda weight: weight.copy_(torch.arange(120.0).view(10, 12)).mul_(torch.linspace(0, 1, 3)[1].item()),
        lambda weight: weight.copy_(weight.flip(0)),
        lambda weight: weight[2:4].normal_().clamp_(-0.5, 0.5),
        lambda weight: torch._foreach_mul_([weight], 3.0),
        lambda weight: weight.copy_(torch.Tensor(10, 12).fill_(2.0)),
        lambda weight: weight.copy_(torch.from_numpy(__import__("numpy").eye(10, 12))),
    ],
)
def test_initialisations_are_repeated(change: Callable[[Tensor], object]) -> None:
    check_equal_to_the_factory(weights(change))


def test_truncated_draws_are_inside_their_bounds_and_the_same_each_time() -> None:
    def make() -> Model:
        layer = nn.Linear(100, 100)
        nn.init.trunc_normal_(layer.weight)
        return model(layer)

    first, second = (made(make).module.get_parameter("weight") for _ in range(2))
    assert torch.equal(first, second)
    assert first.abs().max() <= 2 and 0.8 < first.std() < 0.95


@pytest.mark.parametrize(
    "module",
    [
        lambda: nn.LSTM(4, 8, 2),
        lambda: nn.MultiheadAttention(8, 2),
        lambda: nn.Transformer(8, 2, 1, 1, 16),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 8)),
        lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 8)),
        lambda: nn.Linear(4, 8).to(torch.bfloat16),
    ],
)
def test_torch_modules_are_repeated(module: Callable[[], nn.Module]) -> None:
    found = check_equal_to_the_factory(lambda: model(module()))
    assert not any(each.is_meta for each in state(found.module).values())


def test_an_lstm_computes_with_its_new_weights() -> None:
    found = made(lambda: model(nn.LSTM(4, 8))).module
    output, _ = found(torch.ones(2, 1, 4))
    output.sum().backward()
    assert all(each.grad is not None for each in found.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_transformers_models_get_the_values_of_their_factories(kind: str, dtype: torch.dtype) -> None:
    transformers = pytest.importorskip("transformers")
    found = check_equal_to_the_factory(
        lambda: model(transformers.AutoModelForCausalLM.from_config(CONFIGS[kind](transformers), dtype=dtype))
    ).module
    assert next(found.parameters()).dtype == dtype
    assert (found.lm_head.weight is found.get_input_embeddings().weight) == (kind == "gpt2")
    tokens = torch.arange(6)[None]
    assert math.isfinite(float(found(tokens, labels=tokens).loss.detach()))


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_weights_of_a_folder_of_transformers_are_kept(kind: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    saved = transformers.AutoModelForCausalLM.from_config(CONFIGS[kind](transformers))
    saved.save_pretrained(tmp_path)
    found, deferred = record(lambda: make_model(Factory(name=f"hf:{tmp_path}")), 0)
    # The run reads them afterwards, each rank its own part.
    assert not deferred.note and found.weights is not None and found.weights.folder == tmp_path
    assert all(each.is_meta for each in found.module.parameters())
    pytest.importorskip("peft", reason="no peft here (pip install 'netfold[hf]')")
    beside, others = record(lambda: make_model(Factory.model_validate({"name": f"hf:{tmp_path}", "lora": {}})), 0)
    assert not others.note and beside.weights is not None
    assert all(each.is_meta for each in beside.module.parameters())
    # Every weight but the adapters'.
    names = {name for name, _ in beside.module.named_parameters() if "lora_" not in name}
    assert beside.weights.names.keys() == names
    assert sorted(beside.weights.names.values()) == sorted(name for name, _ in saved.named_parameters())
    # A head for another number of classes: transformers reads the other weights, whole.
    classes = {"name": f"hf:{tmp_path}", "task": "sequence-classification", "labels": 3}
    whole, others = record(lambda: make_model(Factory.model_validate(classes)), 0)
    assert "uses the meta device" in others.note and whole.weights is None


def test_a_value_depends_on_the_seed_and_the_name_alone() -> None:
    few, many = (
        state(made(lambda: make_model(Factory(name="gpt", width=16, layers=layers, context=8))).module)  # noqa: B023
        for layers in (1, 3)
    )
    assert all(torch.equal(value, many[name]) for name, value in few.items())
    names = [f"layers.block{number}.attention.query.weight" for number in range(3)]
    assert not torch.equal(many[names[0]], many[names[1]])
    other = made(lambda: make_model(Factory(name="gpt", width=16, layers=1, context=8)), seed=1).module
    assert not torch.equal(few[names[0]], other.get_parameter(names[0]))


def test_a_weight_that_copies_another_has_its_random_values() -> None:
    def make() -> Model:
        layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
        noise = torch.randn(4, 4)
        with torch.no_grad():
            layers[1].weight.copy_(layers[0].weight)
            layers[0].weight.mul_(2)
            layers[1].bias.copy_(noise[0])
            layers[2].bias.copy_(noise[1])
            layers[2].weight.copy_(noise)
        return model(layers)

    first, second, third = made(make).module.children()
    assert torch.equal(first.get_parameter("weight"), 2 * second.get_parameter("weight"))
    assert torch.equal(second.get_parameter("bias"), third.get_parameter("weight")[0])
    assert torch.equal(third.get_parameter("bias"), third.get_parameter("weight")[1])


def test_tied_weights_stay_tied_and_views_stay_views() -> None:
    def make() -> Model:
        layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
        layers[1].weight = layers[0].weight
        layers[2].register_buffer("transposed", layers[0].weight.detach().T)
        return model(layers)

    first, second, third = made(make).module.children()
    assert first.weight is second.weight
    with torch.no_grad():
        first.get_parameter("weight")[1, 2] = 5
    assert third.get_buffer("transposed")[2, 1] == 5


def test_marks_of_parameters_stay() -> None:
    def make() -> Model:
        layer = nn.Linear(2, 2)
        layer.weight.decays = False  # type: ignore[attr-defined]
        layer.bias.requires_grad = False
        return model(layer)

    layer = made(make).module
    assert layer.weight.decays is False and not layer.bias.requires_grad


def test_recording_needs_no_memory_and_leaves_the_random_generator_alone() -> None:
    before = torch.get_rng_state()
    # 550 GB of weights.
    found, deferred = record(lambda: make_model(Factory(name="gpt", width=16384, layers=42, vocabulary=30000)), 0)
    assert sum(each.nbytes for each in found.module.parameters()) > 5e11
    norm = deferred.value("layers.block41.mlp_norm.weight")
    assert torch.equal(norm, torch.ones(16384))
    assert torch.equal(torch.get_rng_state(), before)


def _random_choice() -> Model:
    return model(nn.Linear(2, 2, bias=bool(torch.rand(1) > 2)))


def _own_generator() -> Model:
    layer = nn.Linear(2, 2)
    nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(1))
    return model(layer)


def _attribute() -> Model:
    layer = nn.Linear(2, 2)
    layer.scale = torch.ones(2)  # type: ignore[assignment]
    return model(layer)


def _in_the_loss() -> Model:
    weight = torch.ones(2)
    return Model(nn.Linear(2, 2), lambda output, target: (output * weight).mean())


OUTSIDE = torch.zeros(2)


def _outside() -> Model:
    OUTSIDE.add_(1)
    return model(nn.Linear(2, 2))


def _numpy() -> Model:
    layer = nn.Linear(2, 2)
    layer.weight.detach().numpy()[:] = 3
    return model(layer)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (_random_choice, "random value"),
        (_own_generator, "own random generator"),
        (_attribute, "outside of parameters"),
        (_in_the_loss, "outside of parameters"),
        (_outside, "from outside"),
        (_numpy, "numpy"),
    ],
)
def test_a_factory_that_cannot_be_recorded_makes_its_model_for_real(make: Callable[[], Model], reason: str) -> None:
    OUTSIDE.zero_()
    first, deferred = record(make, 3)
    assert reason in deferred.note
    materialise(first.module, deferred)
    second, _ = record(make, 3)
    torch.manual_seed(3)
    for name, value in state(make().module).items():
        assert torch.equal(value, state(first.module)[name]) and torch.equal(value, state(second.module)[name])
    assert OUTSIDE[0] == (3 if make is _outside else 0)


def test_a_file_of_weights_is_loaded(tmp_path: Path) -> None:
    kept = nn.Linear(3, 2)
    torch.save(kept.state_dict(), tmp_path / "weights.pt")

    def make() -> Model:
        layer = nn.Linear(3, 2)
        layer.load_state_dict(torch.load(tmp_path / "weights.pt"))
        return model(layer)

    found, deferred = record(make, 0)
    materialise(found.module, deferred)
    assert torch.equal(found.module.get_parameter("weight"), kept.weight)


def test_a_wrong_factory_raises_its_own_error() -> None:
    with pytest.raises(ValueError, match="not a multiple of heads"):
        record(lambda: make_model(Factory(name="gpt", width=10, heads=4)), 0)


def test_values_are_there_for_a_while() -> None:
    found, deferred = record(lambda: model(nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))), 0)
    layer = found.module.get_submodule("0")
    with materialised(layer, deferred, torch.device("cpu"), "0."):
        layer(torch.rand(4, 2))
        assert layer.num_batches_tracked == 1
    assert all(each.is_meta for each in state(found.module).values())
    materialise(found.module, deferred)
    assert layer.num_batches_tracked == 0


def test_a_strange_tensor_without_values_is_refused() -> None:
    found, deferred = record(lambda: model(nn.Linear(2, 2)), 0)
    found.module.register_buffer("new", torch.empty(2, device="meta"))
    with pytest.raises(ValueError, match="new is on the meta device"):
        materialise(found.module, deferred)


@pytest.fixture
def rank() -> Iterator[int]:
    """Of four. One rank a process: torch keeps meshes of equal shape."""
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=4)  # type: ignore[no-untyped-call]
    yield 3
    dist.destroy_process_group()


def _stack() -> Model:
    """Seven rows cannot be divided by 4: parts are unequal, and the last is smaller."""
    layers = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Linear(8, 7))
    layers[2].weight = layers[0].weight
    return model(layers)


def check_parts(found: Model, deferred: Deferred) -> None:
    for name, value in state(found.module).items():
        whole = deferred.value(name)
        if isinstance(value, DTensor):
            kept = value.to_local()
            assert value.shape == whole.shape
            # A part's memory is not the whole's. FSDP2 fills the last rank's rows up to the number of the others'.
            assert kept.untyped_storage().nbytes() <= whole.nbytes // 2
            assert torch.equal(kept, _cut(whole, value.device_mesh, value.placements)), name
        else:
            assert torch.equal(value, whole), name


def _cut(whole: Tensor, mesh: Any, placements: Any) -> Tensor:
    # From the last axis of the mesh's outside in: FSDP2 cuts what tensor parallelism has cut.
    for dimension in sorted(range(mesh.ndim), reverse=True):
        placement = placements[dimension]
        if placement.is_replicate():
            continue
        chunks = list(whole.chunk(mesh.size(dimension), placement.dim))
        place = mesh.get_local_rank(dimension)
        whole = chunks[place] if place < len(chunks) else whole.narrow(placement.dim, 0, 0)
    return whole


def test_ranks_of_fsdp_get_their_rows(rank: int) -> None:
    found, deferred = record(_stack, 0)
    mesh = init_device_mesh("cpu", (4,))
    for part in (found.module[3], found.module):  # type: ignore[index]
        fully_shard(part, mesh=mesh)
    materialise(found.module, deferred)
    check_parts(found, deferred)
    assert found.module[0].weight is found.module[2].weight  # type: ignore[index]
    found.module(torch.rand(4, 8)).sum().backward()
    assert all(each.grad is not None for each in found.module.parameters())


def test_ranks_of_tensor_parallelism_under_fsdp_get_their_parts(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))

    def make() -> Model:
        return model(nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 8)))

    found, deferred = record(make, 0)
    before = copy.deepcopy(state(made(make).module))
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    parallelize_module(found.module, mesh["tensor"], plan, src_data_rank=None)
    fully_shard(found.module, mesh=mesh["data"])
    materialise(found.module, deferred)
    check_parts(found, deferred)
    assert all(torch.equal(deferred.value(name), value) for name, value in before.items())
    first = found.module[0].weight.to_local()  # type: ignore[index]
    row, column = divmod(rank, 2)
    assert torch.equal(first, before["0.weight"][6 * column + 3 * row :][:3])
