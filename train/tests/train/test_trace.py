"""Traces of modules without memory, against published numbers, measurements of recipes, and torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from netfold.cli import app  # noqa: E402
from netfold_plan.model import Layered, ShardSpec, TensorSize, Traced  # noqa: E402
from netfold_train.data.examples import Batch  # noqa: E402
from netfold_train.dry_run import TraceError, parse_input, parse_module, trace_module  # noqa: E402
from netfold_train.dry_run.layers import measure  # noqa: E402
from netfold_train.models import make_model  # noqa: E402
from netfold_train.recipe import Factory  # noqa: E402

pytestmark = pytest.mark.torch
HERE = "test_trace"


def trace(what: str | Callable[[], Any], *inputs: str) -> Traced:
    make = parse_module(what) if isinstance(what, str) else what
    return trace_module(make, [parse_input(each) for each in inputs], "it")


@pytest.fixture(scope="module")
def resnet50() -> Traced:
    return trace("resnet50:classes=1000", "2x3x224x224")


def test_resnet_50_has_its_published_parameters_and_the_catalogues_arithmetic(resnet50: Traced) -> None:
    # num_params and GFLOPS in torchvision's documentation, which counts a multiply-add as one.
    assert resnet50.parameters == 25_557_032
    forward = sum(part.forward.flops for part in resnet50.parts) / 2
    assert forward / 2 == pytest.approx(4.09e9, rel=0.01)
    products = sum(layer.forward.flops for layer in Layered("resnet50").layers(ShardSpec(1)))
    assert forward == products
    # Pictures need no gradient: the first convolution computes none for its input.
    first = resnet50.parts[0].forward.flops / 2
    assert resnet50.flops == 3 * forward - first


def test_resnet_50_is_cut_between_blocks_with_one_tensor_at_each_cut(resnet50: Traced) -> None:
    starts = {resnet50.parts[block.start].name: resnet50.parts[block.start] for block in resnet50.blocks}
    for stage, count in enumerate((3, 4, 6, 3)):
        for number in range(count):
            assert starts[f"layers.stage{stage}_block{number}.body.0.conv"].tensors == 1


def test_the_buckets_of_resnet_50_are_those_of_torch(resnet50: Traced) -> None:
    gradients = [torch.empty(each.elements, device="meta") for each in resnet50.gradients]
    limits = [dist._DEFAULT_FIRST_BUCKET_BYTES, 25 * 2**20]
    torchs, _ = dist._compute_bucket_assignment_by_size(gradients, limits)
    sizes = [sum(gradients[index].numel() for index in bucket) for bucket in torchs]
    assert [bucket.elements for bucket in resnet50.buckets(25 * 2**20, 4)] == sizes


@pytest.mark.parametrize(
    ("name", "options", "given", "target", "learnt"),
    [
        ("gpt", {"layers": 2}, "4x64:int64", "4x64:int64", 528_388 - 264_192),
        ("bert", {"layers": 1, "vocabulary": 300}, "4x64:int64", "4x64:int64", None),
        ("edsr", {"blocks": 2}, "4x3x24x24", "4x3x48x48", 110_592),
        ("resnet18", {}, "4x3x32x32", "4:int64", None),
    ],
)
def test_a_trace_equals_the_measured_layers_of_a_recipe(
    name: str, options: dict[str, Any], given: str, target: str, learnt: int | None
) -> None:
    asked = Factory.model_validate({"name": name} | options)
    found = trace(lambda: make_model(asked), given)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake:
        model = make_model(asked)
    example = Batch(*((zeros(given),), zeros(target)))
    layers, unknown = measure(model, fake, example, samples=4)
    assert not unknown
    for layer in layers:
        parts = [part for part in found.parts if f"{part.name}.".startswith(f"layers.{layer.name}.")]
        flops = sum(part.forward.flops + part.backward.flops for part in parts)
        assert (sum(part.parameters for part in parts), flops) == (layer.parameters, layer.operations), layer.name
        kept = sum((part.kept for part in parts), TensorSize()).bytes(4)
        assert layer.saved_bytes is not None
        # The last layer of a chain includes the loss.
        less = layer.saved_bytes - kept
        if layer is layers[-1]:
            assert less == learnt or learnt is None
        else:
            assert less == 0, layer.name


def zeros(said: str) -> Tensor:
    asked = parse_input(said)
    return torch.zeros(asked.shape, dtype=asked.dtype)


def test_traced_gradients_have_the_order_of_a_real_backward_pass() -> None:
    torch.manual_seed(0)
    asked = Factory.model_validate({"name": "gpt", "layers": 2, "width": 16, "heads": 2, "context": 8})
    found = trace(lambda: make_model(asked), "2x8:int64")
    module = make_model(asked).module
    order: list[int] = []
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(lambda each: order.append(each.numel()))
    module(torch.zeros(2, 8, dtype=torch.int64)).sum().backward()
    assert [each.elements for each in found.gradients] == order


def test_a_trace_scaled_to_more_samples_equals_a_trace_of_them() -> None:
    few, many = (trace("gpt:layers=1", f"{samples}x32:int64") for samples in (2, 6))
    for one, other in zip(few.layers(ShardSpec(6)), many.layers(ShardSpec(6)), strict=True):
        assert (one.forward, one.backward, one.kept_bytes) == (other.forward, other.backward, other.kept_bytes)


def test_a_trace_allocates_no_memory() -> None:
    # Eight terabytes.
    found = trace(lambda: nn.Linear(1_000_000, 2_000_000), "4x1000000")
    assert found.parameters == 2e12 + 2e6


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(64, 64), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(self.linear(x))
        heads = x.view(x.shape[0], 1, 1, 64)
        mixed: Tensor = functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.1)
        return mixed


def test_dropout_keeps_one_byte_per_element_and_none_inside_attention() -> None:
    found = {part.name: part for part in trace(Dropped, "8x64").parts}
    assert found["dropout"].kept == TensorSize(other_bytes=8 * 64)
    (attention,) = found["itself"].forward.matmuls
    assert attention.fused == 2


class Deep(nn.Module):
    def __init__(self, again: bool) -> None:
        super().__init__()
        self.again = again
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        return x


def test_activation_checkpointing_keeps_less_and_computes_more() -> None:
    plain, again = (trace(lambda again=again: Deep(again), "8x64") for again in (False, True))
    kept = [sum((part.kept for part in model.parts), TensorSize()).elements for model in (plain, again)]
    # The input of each block.
    assert kept[1] == 3 * 8 * 64 < kept[0]
    # torch stops as soon as it has the needed tensors: the last product of a block is not repeated.
    assert again.flops - plain.flops == 3 * 2 * 64 * 256


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(16, 32, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.lstm(x)[0]
        return hidden


def test_a_recurrent_layer_is_counted_step_by_step() -> None:
    found = trace(Recurrent, "4x10x16")
    # Four gates, each of the input and of the previous state, in each of ten steps.
    assert sum(part.forward.flops for part in found.parts) == 2 * 4 * 10 * 4 * 32 * (16 + 32)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.unused = nn.Embedding(100, 16), nn.Linear(4, 4)

    def forward(self, *, tokens: Tensor) -> dict[str, Tensor]:
        return {"logits": self.words(tokens) @ self.words.weight.t()}


class Turned(nn.Module):
    """A layer that only turns its weight, which is no work."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(5, 16))

    def forward(self) -> Tensor:
        return self.weight.t()


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.turned, self.last = Turned(), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x @ self.turned())


def test_the_weight_of_a_layer_that_does_no_work_counts() -> None:
    found = trace(Around, "2x16")
    assert found.parameters == 80 + 18 and not found.notes


def test_tied_weights_count_once_and_unused_weights_are_noted() -> None:
    found = trace(Tied, "tokens=2x8:int64")
    assert found.parameters == 1600 + 20 and [each.elements for each in found.gradients] == [1600]
    assert "20 parameters are unused; DDP needs find_unused_parameters=True" in found.notes[0]


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y if y.sum() > 0 else 2 * y


class Chosen(Branching):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y[y > 0]


class Unrolled(Branching):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(len(x)):
            x = self.linear(x)
        return x


class Fixed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1


def number() -> int:
    return 3


def lost() -> nn.Module:
    raise FileNotFoundError(2, "No such file or directory", "weights.pt")


@pytest.mark.parametrize(
    ("what", "inputs", "reason"),
    [
        (f"{HERE}:Branching", ("4x8",), r"depends on a computed value at .*test_trace.py:\d+, but a trace has"),
        (f"{HERE}:Chosen", ("4x8",), "depends on a computed value"),
        (f"{HERE}:Unrolled", ("4x8",), "runs different operations for 8 samples than for 4"),
        (f"{HERE}:Fixed", ("4x8",), "no output has a gradient"),
        (f"{HERE}:Branching", ("4x9",), r"inputs of 4x9:float32 at .*test_trace.py:\d+: .*\[4, 9\] X \[8, 8\]"),
        (f"{HERE}:Branching", ("4x8", "5x8"), "inputs of 4 and 5 samples; the first dimension is the sample"),
        (f"{HERE}:Branching", (), "give each, such as --input 32x3x224x224"),
        (f"{HERE}:number", ("4x8",), "returned int and not a torch.nn.Module"),
        (f"{HERE}:lost", ("4x8",), "cannot be made of fake tensors: weights.pt: No such file"),
        (f"{HERE}:Branchng", ("4x8",), "no attribute 'Branchng'"),
        ("no_such_module:it", ("4x8",), "No module named 'no_such_module'; it must be module:factory"),
        ("gptt", ("4x8",), r"did you mean gpt\?"),
        ("gpt:wdth=8", ("4x8:int64",), r"did you mean width\?"),
        ("gpt:width=many", ("4x8:int64",), "it must be a valid integer"),
        ("gpt:layers=1,width", ("4x8:int64",), "'width' has no value"),
        ("gpt", ("4y8",), "'4y8' is not an input; write its shape"),
        ("gpt", ("4x8 GB",), "is not an input; write its shape"),
        ("gpt", ("4x8:int46",), r"there is no dtype 'int46'; did you mean int64\?"),
        ("gpt", ("0x8:int64",), "a dimension is 0"),
    ],
)
def test_a_model_that_cannot_be_traced_is_an_error(what: str, inputs: tuple[str, ...], reason: str) -> None:
    with pytest.raises(TraceError, match=reason):
        trace(what, *inputs)


def test_an_option_may_be_a_list() -> None:
    traced = trace("linear-stack:widths=[8,6,4]", "4x8")
    assert traced.parameters == 8 * 6 + 6 + 6 * 4 + 4
    made = parse_module("dlrm:rows=[5,7],numbers=3,top=[4]")
    assert made.keywords["rows"] == [5, 7] and made.keywords["top"] == [4]  # type: ignore[attr-defined]


def plan(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["plan", *arguments])
    return result.exit_code, " ".join(result.output.split())


def test_the_commands_accept_a_module_and_report_its_errors() -> None:
    tiny = "gpt:layers=1,width=32,vocabulary=64"
    code, said = plan(
        "--module", tiny, "--input", "4x32:int64", "--cluster", "dgx-a100", "--ranks", "8", "--batch", "64"
    )
    assert code == 0 and "traced with 4 samples" in said
    code, said = plan("trace", tiny, "--input", "4x32:int64")
    assert code == 0 and "layers.block0.attention.query 1,056" in said and "DDP's buckets" in said
    code, said = plan("--module", tiny, "--cluster", "dgx-a100", "--ranks", "8", "--batch", "64")
    assert code == 2 and "netfold plan: a trace needs the module's inputs" in said
    code, said = plan("trace", tiny, "--input", "4x32:int64", "--bucket", "25")
    assert code == 2 and "netfold plan trace: --bucket: '25' has no unit" in said
    code, said = plan("--input", "4x8", "--model", "resnet50", "--cluster", "dgx-a100", "--ranks", "8", "--batch", "64")
    assert code == 2 and "there is no --module" in said
