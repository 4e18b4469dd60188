"""Models for a training step: gradients in order, arithmetic per layer, and the time of one accelerator.

A new model is a file that lists its layers, a line in `_LAYERS` and a line in speeds.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

from netfold_plan.model.catalogue import dlrm as recommender
from netfold_plan.model.catalogue.bert import bert
from netfold_plan.model.catalogue.inception import googlenet, inception3, inception4
from netfold_plan.model.catalogue.layers import Layer
from netfold_plan.model.catalogue.mask_rcnn import mask_rcnn
from netfold_plan.model.catalogue.plain import alexnet, edsr, resnet, vgg
from netfold_plan.model.catalogue.speeds import PUBLISHED, SIBLINGS, Speed

__all__ = ["ITEM_BYTES", "MODELS", "SWITCHML_MODELS", "Exchange", "Layer", "Model", "Speed", "find_model"]

_LAYERS: dict[str, Callable[[], list[Layer]]] = {
    "alexnet": alexnet,
    "vgg11": partial(vgg, 11),
    "vgg16": partial(vgg, 16),
    "vgg19": partial(vgg, 19),
    "googlenet": googlenet,
    "inception3": inception3,
    "inception4": inception4,
    "resnet50": partial(resnet, 50),
    "resnet101": partial(resnet, 101),
    "resnet152": partial(resnet, 152),
    "bert-base": partial(bert, 12, 768),
    "bert-large": partial(bert, 24, 1024),
    "edsr-baseline": partial(edsr, 16, 64),
    "edsr": partial(edsr, 32, 256),
    "mask-rcnn": mask_rcnn,
    "dlrm": recommender.dlrm,
}
MODELS = tuple(_LAYERS)

# All values are sent as f32.
ITEM_BYTES = 4

# The nine of SwitchML's figure of speed-ups (Sapio et al. 2021), by tf_cnn_benchmarks' names.
SWITCHML_MODELS = (
    *("alexnet", "googlenet", "inception3", "inception4", "resnet50", "resnet101", "vgg11", "vgg16", "vgg19"),
)


@dataclass(frozen=True)
class Exchange:
    """An all_to_all of the values that other ranks looked up for a rank's samples, f32.

    before: the layer that needs the values. Their gradients go back by another all_to_all.
    """

    values_a_sample: int
    before: str


@dataclass(frozen=True)
class Model:
    """layers: in the order of the forward pass; parallel paths follow one another."""

    name: str
    layers: tuple[Layer, ...]
    speed: Speed
    exchange: Exchange | None = None

    @property
    def parameters(self) -> int:
        return sum(sum(layer.counts) for layer in self.layers)

    @property
    def gradients(self) -> list[int]:
        """Elements of each parameter tensor that is not frozen, in order."""
        return [count for layer in self.layers if not layer.frozen for count in layer.counts]

    @property
    def gradient_bytes(self) -> int:
        return sum(self.gradients) * ITEM_BYTES

    @property
    def exchange_bytes(self) -> int:
        """Of a rank in one all_to_all; there is one in each direction of a step."""
        return 0 if self.exchange is None else self.exchange.values_a_sample * self.speed.batch * ITEM_BYTES

    @property
    def flops(self) -> int:
        """Of one sample's forward pass."""
        return sum(layer.flops for layer in self.layers)

    @property
    def compute_s(self) -> float:
        """Of one step of one accelerator."""
        return self.speed.batch / self.speed.samples_per_s


_EXCHANGES = {"dlrm": Exchange(recommender.TABLES * recommender.WIDTH, before=recommender.FIRST_AFTER_LOOKUP)}


@cache
def find_model(name: str) -> Model:
    """Raises ValueError for a name that is not in `MODELS`."""
    if name not in _LAYERS:
        raise ValueError(f"model {name!r} is not known; there are {', '.join(MODELS)}")
    layers = tuple(_LAYERS[name]())
    return Model(name, layers, _speed(name, layers), _EXCHANGES.get(name))


def _speed(name: str, layers: tuple[Layer, ...]) -> Speed:
    if name in PUBLISHED:
        return PUBLISHED[name]
    sibling = find_model(SIBLINGS[name])
    samples_per_s = sibling.speed.samples_per_s * sibling.flops / sum(layer.flops for layer in layers)
    return Speed(samples_per_s, sibling.speed.batch, f"at the FLOP/s of {sibling.name}", derived=True)
