"""The models: published numbers of parameters, and equal outputs wherever a chain is cut."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from netfold_train import Chain
from netfold_train.models import make_model
from netfold_train.recipe import Factory
from netfold_train.zoo.data.resolution import bicubic
from netfold_train.zoo.models.linear import class_loss

BERT_BASE = {"vocabulary": 30522, "context": 512, "width": 768, "heads": 12, "layers": 12}
GPT2_SMALL = {"vocabulary": 50257, "context": 1024, "width": 768, "heads": 12, "layers": 12}


def chain(name: str, **options: object) -> Chain:
    module = make_model(Factory.model_validate({"name": name, **options})).module
    assert isinstance(module, Chain)
    return module


@pytest.mark.parametrize(
    ("asked", "published"),
    [
        # Lim et al. 2017, table 1: 1.5M and 43M at x4. These numbers are from the authors' code; x2 has a smaller tail.
        ({"name": "edsr-baseline", "scale": 4}, 1_517_571),
        ({"name": "edsr-large", "scale": 4}, 43_089_923),
        ({"name": "edsr-baseline"}, 1_369_859),
        ({"name": "edsr-large"}, 40_729_603),
        ({"name": "edsr-paper", "scale": 4}, 1_517_571),
        ({"name": "edsr-paper-large", "scale": 4}, 43_089_923),
        # torchvision's numbers.
        ({"name": "resnet18", "classes": 1000}, 11_689_512),
        ({"name": "resnet50", "classes": 1000}, 25_557_032),
        # GPT-2's number plus separate weights of the logits.
        ({"name": "gpt", **GPT2_SMALL}, 124_439_808 + 50257 * 768),
        # BERT-base's number without the pooler and the two segments, and separate weights of the logits.
        ({"name": "bert", **BERT_BASE}, 109_482_240 - (768 * 768 + 768) - 2 * 768 + 30522 * 768),
    ],
)
def test_a_model_has_the_published_number_of_parameters(asked: dict[str, object], published: int) -> None:
    with torch.device("meta"):
        module = make_model(Factory.model_validate(asked)).module
    assert sum(parameter.numel() for parameter in module.parameters()) == published


@pytest.mark.parametrize(
    ("asked", "inputs", "shape"),
    [
        ({"name": "edsr", "features": 8, "blocks": 2, "scale": 3}, torch.rand(2, 3, 6, 7), (2, 3, 18, 21)),
        (
            {"name": "edsr", "features": 8, "blocks": 2, "scale": 4, "residual_scale": 0.1},
            torch.rand(2, 3, 6, 7),
            (2, 3, 24, 28),
        ),
        ({"name": "edsr-paper"}, torch.rand(2, 3, 6, 7), (2, 3, 12, 14)),
        ({"name": "resnet18", "classes": 7, "channels": 1}, torch.rand(2, 1, 28, 28), (2, 7)),
        ({"name": "resnet18", "classes": 7, "stem": "small"}, torch.rand(2, 3, 16, 16), (2, 7)),
        ({"name": "resnet50", "classes": 7}, torch.rand(2, 3, 17, 20), (2, 7)),
        (
            {"name": "gpt", "width": 16, "heads": 2, "layers": 2, "context": 8},
            torch.randint(256, (2, 8)),
            (2, 8, 256),
        ),
        (
            {"name": "bert", "width": 16, "heads": 2, "layers": 2, "context": 8},
            torch.randint(257, (2, 8)),
            (2, 8, 257),
        ),
        (
            {"name": "gpt-moe", "width": 16, "heads": 2, "layers": 2, "context": 8, "experts": 3},
            torch.randint(256, (2, 8)),
            (2, 8, 256),
        ),
    ],
    ids=lambda value: value["name"] if isinstance(value, dict) else None,
)
def test_the_parts_of_a_chain_have_the_output_and_the_names_of_the_whole_chain(
    asked: dict[str, object], inputs: Tensor, shape: tuple[int, ...]
) -> None:
    torch.manual_seed(1)
    whole = make_model(Factory.model_validate(asked)).module.eval()
    assert isinstance(whole, Chain)
    # EDSR's last convolution starts at 0 and would hide the layers before it.
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.01)
        output = whole(inputs)
        assert isinstance(output, Tensor) and output.shape == shape
        for place in range(1, len(whole)):
            between = whole.part(0, place)(inputs)
            rest = whole.part(place, len(whole))(*(between if isinstance(between, tuple) else (between,)))
            assert isinstance(rest, Tensor) and torch.equal(rest, output), place
    names = [name for place in range(len(whole)) for name, _ in whole.part(place, place + 1).named_parameters()]
    assert names == [name for name, _ in whole.named_parameters()]


def test_an_untrained_edsr_is_bicubic_and_both_skips_reach_its_output() -> None:
    edsr, low = chain("edsr", features=8, blocks=2), torch.rand(2, 3, 9, 11)
    enlarged = torch.nn.functional.interpolate(low, scale_factor=2, mode="bicubic", antialias=True)
    assert enlarged.shape == (2, 3, 18, 22) and torch.equal(edsr(low), enlarged)
    assert torch.equal(enlarged, bicubic(low, 2))
    features, skip, large = edsr.part(0, 1)(low)
    assert torch.equal(features, skip) and torch.equal(large, enlarged)
    # If the body's output is 0, the output still depends on the head's features.
    tail = edsr.layers["tail"]
    torch.nn.init.ones_(tail.last.weight)
    for parameter in tail.body.parameters():
        torch.nn.init.zeros_(parameter)
    assert not torch.allclose(edsr(low), enlarged)


def test_an_edsr_has_no_batch_norm() -> None:
    assert not any("Norm" in type(module).__name__ for module in chain("edsr", features=8, blocks=2).modules())


def drawn(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("asked", "inputs"),
    [
        ({"name": "edsr", "features": 8, "blocks": 1}, drawn(2, 3, 8, 8)),
        # Batch norm of few numbers would subtract nearly equal numbers, for which 16 bits are too few.
        ({"name": "resnet18"}, drawn(8, 3, 64, 64)),
        ({"name": "bert", "width": 16, "heads": 2, "layers": 1}, drawn(2, 8).mul(257).long()),
    ],
    ids=["edsr", "resnet18", "bert"],
)
def test_a_model_computes_in_16_bits(asked: dict[str, object], inputs: Tensor, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    module = make_model(Factory.model_validate(asked)).module
    whole = module(inputs)
    half = module.to(dtype)(inputs.to(dtype) if inputs.is_floating_point() else inputs)
    half.float().sum().backward()
    assert torch.allclose(half.float(), whole, atol=0.1, rtol=0.05)
    assert all(parameter.grad is not None and parameter.grad.dtype == dtype for parameter in module.parameters())


def test_a_block_multiplies_its_residual_by_residual_scale() -> None:
    torch.manual_seed(1)
    block = chain("edsr", features=8, blocks=1, residual_scale=0.1).layers["block0"]
    x = torch.rand(1, 8, 5, 5)
    with torch.no_grad():
        detail = block.second(torch.relu(block.first(x)))
        assert torch.allclose(block(x, x, x)[0], x + 0.1 * detail, atol=1e-6)


def test_outputs_of_a_gpt_do_not_depend_on_later_tokens_and_those_of_a_bert_do() -> None:
    torch.manual_seed(1)
    one = torch.randint(256, (1, 8))
    other = one.clone()
    other[0, 5] = (one[0, 5] + 1) % 256
    options = {"width": 16, "heads": 2, "layers": 2, "context": 8}
    with torch.no_grad():
        gpt, bert = chain("gpt", **options), chain("bert", **options)
        assert torch.equal(gpt(one)[:, :5], gpt(other)[:, :5]) and not torch.equal(gpt(one)[:, 5:], gpt(other)[:, 5:])
        assert not torch.allclose(bert(one)[:, :5], bert(other)[:, :5])


def test_a_classifier_has_the_embedding_and_the_blocks_of_a_bert() -> None:
    options = {"width": 16, "heads": 2, "layers": 2, "context": 8}
    made = make_model(Factory.model_validate({"name": "bert-classes", "classes": 5, **options}))
    of_bert = {name: weight.shape for name, weight in chain("bert", **options).named_parameters()}
    own = {name: weight.shape for name, weight in made.module.named_parameters()}
    assert set(of_bert) - set(own) == {"layers.head.logits.weight"}
    assert set(own) - set(of_bert) == {"layers.head.classes.weight", "layers.head.classes.bias"}
    assert all(own[name] == of_bert[name] for name in set(own) & set(of_bert))
    tokens = torch.randint(256, (3, 8))
    logits = made.module(tokens)
    assert logits.shape == (3, 5) and made.loss(logits, torch.arange(3)).shape == (3,)
    # Every token counts, the last one too.
    tokens[0, -1] = (tokens[0, -1] + 1) % 256
    assert not torch.allclose(made.module(tokens)[0], logits[0]) and torch.equal(made.module(tokens)[1:], logits[1:])
    assert made.tensor_plan is not None and "layers.block1.mlp.down" in made.tensor_plan("alternating", False)
    with pytest.raises(ValueError, match=r"parallel.sequence: bert-classes takes the mean over the sequence"):
        made.tensor_plan("alternating", True)


def test_the_losses_of_masked_tokens_are_those_of_single_samples() -> None:
    torch.manual_seed(1)
    logits, target = torch.randn(4, 6, 9, dtype=torch.float64), torch.full((4, 6), -100)
    for row in range(4):
        target[row, torch.randperm(6)[:2]] = torch.randint(9, (2,))
    parts = [class_loss(logits[row : row + 1], target[row : row + 1]) for row in range(4)]
    assert torch.allclose(class_loss(logits, target), torch.cat(parts), rtol=1e-6)
    assert torch.equal(class_loss(logits, target) == 0, target == -100)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"name": "edsr-baseline", "scale": 5}, "model.scale is 5; it must be 2, 3 or 4"),
        ({"name": "resnet18", "stem": "tiny"}, "model.stem is 'tiny'; it must be 'large' or 'small'"),
        ({"name": "gpt", "width": 30, "heads": 4}, "width 30 is not a multiple of heads 4"),
        ({"name": "resnet18", "depth": 3}, "model.depth is not a key of resnet18"),
        ({"name": "resnet19"}, "did you mean resnet18?"),
    ],
)
def test_an_error_of_an_option_names_it(asked: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said.replace(".", r"\.")):
        make_model(Factory.model_validate(asked))


def test_the_papers_edsr_takes_the_mean_colour_off_and_adds_it_again() -> None:
    module, low = chain("edsr-paper"), torch.rand(2, 3, 6, 7)
    weights = dict(module.named_parameters())
    mean = torch.tensor([0.4488, 0.4371, 0.4040]).view(3, 1, 1)

    def conv(x: Tensor, name: str) -> Tensor:
        return functional.conv2d(x, weights[f"layers.{name}.weight"], weights[f"layers.{name}.bias"], padding=1)

    head = x = conv(low - mean, "head.conv")
    for number in range(16):
        x = x + conv(conv(x, f"block{number}.first").relu(), f"block{number}.second")
    large = functional.pixel_shuffle(conv(head + conv(x, "tail.body"), "tail.upsample.0"), 2)
    torch.testing.assert_close(module(low), mean + conv(large, "tail.last"))
    assert module.layers["block0"].second.bias.abs().max() > 0, "torch's own initial weights"
