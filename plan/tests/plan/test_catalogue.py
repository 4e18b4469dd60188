"""The layers of the models against published numbers."""

import pytest

from netfold_lab.bench.step_table import render_models
from netfold_plan.model.catalogue import MODELS, SWITCHML_MODELS, find_model
from netfold_plan.model.catalogue.bert import TOKENS
from netfold_plan.model.catalogue.inception import googlenet, inception3
from netfold_plan.model.catalogue.layers import Stack, linear
from netfold_plan.model.catalogue.speeds import PUBLISHED, SIBLINGS

# num_params of the weights in torchvision's documentation (docs.pytorch.org/vision/stable/models.html).
TORCHVISION = {
    "alexnet": 61_100_840,
    "vgg11": 132_863_336,
    "vgg16": 138_357_544,
    "vgg19": 143_667_240,
    "googlenet": 6_624_904,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
    "mask-rcnn": 44_401_393,
}
# BertModel of bert-base-uncased and bert-large-uncased in Hugging Face's transformers, pooler included.
TRANSFORMERS = {"bert-base": 109_482_240, "bert-large": 335_141_888}
# GFLOPS in torchvision's documentation, which counts a multiply-add as one and norms not at all.
MULTIPLY_ADDS = {
    "alexnet": 0.71e9,
    "vgg11": 7.61e9,
    "vgg16": 15.47e9,
    "vgg19": 19.63e9,
    "googlenet": 1.50e9,
    "inception3": 5.71e9,
    "resnet50": 4.09e9,
    "resnet101": 7.80e9,
    "resnet152": 11.51e9,
}


@pytest.mark.parametrize(("name", "parameters"), [*TORCHVISION.items(), *TRANSFORMERS.items()])
def test_the_layers_of_a_model_have_its_published_parameter_count(name: str, parameters: int) -> None:
    assert find_model(name).parameters == parameters


def test_inceptions_with_auxiliary_heads_have_torchvisions_parameter_count() -> None:
    # torchvision's documentation counts Inception v3 with its head, and GoogLeNet without; its GoogLeNet() has two.
    deep = Stack(768, 17, 17).pool(5, 3).conv_norm(128, 1).conv_norm(768, 5).linear(1000)
    assert sum(sum(layer.counts) for layer in [*inception3(), *deep.layers]) == 27_161_264
    heads = [Stack(channels, 4, 4).conv_norm(128, 1).linear(1024).linear(1000) for channels in (512, 528)]
    layers = [*googlenet(), *(layer for head in heads for layer in head.layers)]
    assert sum(sum(layer.counts) for layer in layers) == 13_004_888
    # The head of Inception v3: a convolution to 128, one of 5 x 5 to 768, a classifier.
    head = 768 * 128 + 2 * 128 + 128 * 768 * 25 + 2 * 768 + 768 * 1000 + 1000
    assert find_model("inception3").parameters == 27_161_264 - head


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        # param_count in timm's results (results/results-imagenet.csv).
        ("inception4", 42.68),
        # Lim et al. 2017, table 1.
        ("edsr-baseline", 1.5),
        ("edsr", 43),
    ],
)
def test_a_rounded_published_count_matches_to_its_last_digit(name: str, millions: float) -> None:
    digits = len(str(millions).partition(".")[2]) if isinstance(millions, float) else 0
    assert round(find_model(name).parameters / 1e6, digits) == millions


def test_the_perceptrons_of_dlrm_have_the_sizes_of_the_mlperf_reference() -> None:
    # --arch-mlp-bot 13-512-256-128 --arch-mlp-top 479-1024-1024-512-256-1: the interaction of 27 vectors is 479 wide.
    sizes = [(13, 512), (512, 256), (256, 128), (479, 1024), (1024, 1024), (1024, 512), (512, 256), (256, 1)]
    model = find_model("dlrm")
    assert [layer.shapes[0] for layer in model.layers if layer.shapes] == [(b, a) for a, b in sizes]
    assert model.exchange is not None and model.exchange.values_a_sample == 26 * 128


@pytest.mark.parametrize(("name", "multiply_adds"), MULTIPLY_ADDS.items())
def test_the_flops_of_a_model_are_within_a_percent_of_the_published_count(name: str, multiply_adds: float) -> None:
    assert find_model(name).flops / 2 == pytest.approx(multiply_adds, rel=0.011)


def test_the_flops_of_bert_are_two_per_parameter_and_token_plus_attention() -> None:
    model = find_model("bert-large")
    matrices = 24 * 12 * 1024 * 1024
    pairs = 24 * 2 * TOKENS * TOKENS * 1024
    assert model.flops == pytest.approx(2 * (TOKENS * matrices + pairs), rel=0.005)


def test_a_frozen_layer_counts_as_parameters_and_sends_nothing() -> None:
    model = find_model("mask-rcnn")
    # The first convolution and the first stage of ResNet-50.
    frozen = 64 * 3 * 49 + (64 * 64 + 64 * 64 * 9 + 64 * 256 + 64 * 256) + 2 * (256 * 64 + 64 * 64 * 9 + 64 * 256)
    assert model.parameters - sum(model.gradients) == frozen


def test_every_model_has_a_speed_with_a_source_and_derived_speeds_scale_a_sibling_by_flops() -> None:
    assert set(PUBLISHED) | set(SIBLINGS) == set(MODELS) and not set(PUBLISHED) & set(SIBLINGS)
    for name in MODELS:
        model = find_model(name)
        assert model.speed.source and model.speed.derived == (name in SIBLINGS)
    vgg19, vgg16 = find_model("vgg19"), find_model("vgg16")
    assert vgg19.speed.samples_per_s * vgg19.flops == pytest.approx(154 * vgg16.flops)
    assert vgg19.compute_s == pytest.approx(64 / vgg19.speed.samples_per_s)


def test_the_nine_models_of_switchml_are_in_the_catalogue() -> None:
    assert len(set(SWITCHML_MODELS)) == 9 and set(SWITCHML_MODELS) < set(MODELS)


def test_an_unknown_model_is_refused_with_the_known_names() -> None:
    with pytest.raises(ValueError, match=r"there are alexnet, .*resnet50"):
        find_model("resnet18")


def test_sizes_follow_strides_paddings_and_roundings() -> None:
    image = Stack(3, 224, 224).conv(8, 7, 2, 3)
    assert image.size == (112, 112)
    assert image.fork().pool(3, 2).size == (55, 55)
    assert image.fork().pool(3, 2, round_up=True).size == (56, 56)
    assert image.fork().conv(8, (1, 7), 1, (0, 3)).size == (112, 112)
    assert image.fork().upconv(4, 2).size == (224, 224)
    assert image.fork().conv(4, 3, 1, 1).shuffle_up(2).channels == 1


def test_convolution_flops_are_one_multiply_add_for_each_weight_and_position() -> None:
    image = Stack(3, 10, 12).conv(4, 3, 1, 1)
    (layer,) = image.layers
    assert layer.shapes == ((4, 3, 3, 3), (4,))
    assert layer.flops == 2 * (4 * 3 * 3 * 3) * (10 * 12)
    assert linear("", 5, 7, rows=3).flops == 2 * 5 * 7 * 3


def test_the_list_names_every_model_with_its_source() -> None:
    lines = render_models().splitlines()
    for name in MODELS:
        (line,) = [line for line in lines if line.split()[0] == name]
        assert str(find_model(name).parameters) in line and find_model(name).speed.source in line
