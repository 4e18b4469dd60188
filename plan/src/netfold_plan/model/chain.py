"""Models as a chain of layers, each counted for one sample: convolutions, perceptrons, and the models of recipes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from netfold_plan.model.layer_cost import Layer, Matmul, Pass, ShardSpec, check_unsplit


@dataclass(frozen=True)
class Product:
    """A matrix product per sample, [rows, k] by [k, n]. For a convolution, rows are the positions of its output."""

    rows: float
    n: int
    k: int


@dataclass(frozen=True)
class ChainLayer:
    """One layer, for one sample; activations are counted in elements.

    changed: elements that operations other than products (norms, activation functions) read and write in the forward
    pass. kept: elements kept until the backward pass. handed: elements that the next layer receives.
    kernels: launched in addition to those of the products.
    """

    name: str
    products: tuple[Product, ...]
    parameters: int
    changed: float
    kept: float
    handed: float
    kernels: int = 1
    frozen: bool = False


@dataclass(frozen=True)
class Chain:
    """A sequence of layers, for data and pipeline parallelism; tensor ranks cannot split the layers."""

    name: str
    links: tuple[ChainLayer, ...]

    @property
    def parameters(self) -> float:
        return float(sum(link.parameters for link in self.links))

    @property
    def flops(self) -> float:
        """Forward, and twice that backward for a layer that is not frozen."""
        return sum(
            2.0 * product.rows * product.n * product.k * (1 if link.frozen else 3)
            for link in self.links
            for product in link.products
        )

    def layers(self, share: ShardSpec) -> tuple[Layer, ...]:
        check_unsplit(self.name, share)
        return _layers(self, share)


@lru_cache(maxsize=512)
def _layers(chain: Chain, share: ShardSpec) -> tuple[Layer, ...]:
    made, received = [], 0.0
    for link in chain.links:
        made.append(_layer(link, share, received))
        received = link.handed
    return tuple(made)


def _layer(link: ChainLayer, share: ShardSpec, received: float) -> Layer:
    bytes_per_element = share.micro_batch * share.item_bytes
    matmuls = tuple(
        Matmul(max(1, round(product.rows * share.micro_batch)), product.n, product.k) for product in link.products
    )
    forward = Pass(matmuls, 2 * link.changed * bytes_per_element, len(matmuls) + link.kernels)
    backward = Pass(matmuls * 2, 4 * link.changed * bytes_per_element, 2 * (len(matmuls) + link.kernels))
    again, kept = Pass(), link.kept
    if share.recomputation == "full":
        again, kept = forward, received
    return Layer(
        name=link.name,
        forward=forward,
        backward=Pass() if link.frozen else backward,
        again=again,
        parameters=float(link.parameters),
        kept_bytes=kept * bytes_per_element,
        input_bytes=received * bytes_per_element,
        live_bytes=max(0.0, link.kept - kept) * bytes_per_element,
    )
