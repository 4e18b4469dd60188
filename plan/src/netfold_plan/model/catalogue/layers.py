"""Layers by their parameter tensors, in order, and their arithmetic. Pure.

A `Stack` appends layers and tracks the shape of the activations between them. So a model is written as in its paper,
and nothing is counted by hand.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, floor, prod
from typing import Self

# A multiplication and an addition.
_MULTIPLY_ADD = 2


@dataclass(frozen=True)
class Layer:
    """shapes: of its parameters, in a framework's order. flops: of one sample's forward pass, a multiply-add as two.

    frozen: its parameters do not change, so it has no gradients and no backward pass.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    flops: int
    frozen: bool = False

    @property
    def counts(self) -> list[int]:
        """Elements of each parameter tensor."""
        return [prod(shape) for shape in self.shapes]


def linear(name: str, inputs: int, outputs: int, *, rows: int = 1) -> Layer:
    """[outputs, inputs] and a bias, on so many rows per sample (tokens, regions)."""
    return Layer(name, ((outputs, inputs), (outputs,)), _MULTIPLY_ADD * rows * inputs * outputs)


def embedding(name: str, entries: int, width: int) -> Layer:
    """A look-up table with a dense gradient, as torch's default is."""
    return Layer(name, ((entries, width),), 0)


def layer_norm(name: str, width: int, *, rows: int) -> Layer:
    return Layer(name, ((width,), (width,)), _MULTIPLY_ADD * rows * width)


def attention(name: str, tokens: int, width: int) -> Layer:
    """Scores of all pairs of tokens, and values weighted by them: arithmetic without parameters."""
    return Layer(name, (), 2 * _MULTIPLY_ADD * tokens * tokens * width)


class Stack:
    """Convolutions and the layers around them. size: height and width of the next layer's input.

    rows: how many inputs a sample has here (regions of a detector; else 1). frozen: of the layers appended from now on.
    """

    def __init__(
        self, channels: int, height: int, width: int, *, layers: list[Layer] | None = None, rows: int = 1
    ) -> None:
        self.layers: list[Layer] = [] if layers is None else layers
        self.channels = channels
        self.size = (height, width)
        self.rows = rows
        self.frozen = False

    def conv(
        self,
        outputs: int,
        kernel: int | tuple[int, int],
        stride: int = 1,
        padding: int | tuple[int, int] = 0,
        *,
        bias: bool = True,
    ) -> Self:
        """[outputs, channels, kernel, kernel] and a bias."""
        high, wide = _pair(kernel)
        self.size = _sizes(self.size, (high, wide), stride, _pair(padding), floor)
        shape = (outputs, self.channels, high, wide)
        flops = _MULTIPLY_ADD * self.rows * prod(shape) * prod(self.size)
        self._append("conv", (shape, (outputs,)) if bias else (shape,), flops)
        self.channels = outputs
        return self

    def upconv(self, outputs: int, kernel: int) -> Self:
        """A transposed convolution with stride `kernel`: [channels, outputs, kernel, kernel] and a bias."""
        shape = (self.channels, outputs, kernel, kernel)
        self._append("upconv", (shape, (outputs,)), _MULTIPLY_ADD * self.rows * prod(shape) * prod(self.size))
        self.size = (self.size[0] * kernel, self.size[1] * kernel)
        self.channels = outputs
        return self

    def norm(self) -> Self:
        """Batch norm: a scale and a shift for each channel."""
        flops = _MULTIPLY_ADD * self.rows * self.channels * prod(self.size)
        self._append("norm", ((self.channels,), (self.channels,)), flops)
        return self

    def conv_norm(
        self, outputs: int, kernel: int | tuple[int, int], stride: int = 1, padding: int | tuple[int, int] = 0
    ) -> Self:
        """A convolution without a bias, and batch norm: the most frequent pair in these models."""
        return self.conv(outputs, kernel, stride, padding, bias=False).norm()

    def pool(self, kernel: int, stride: int, padding: int = 0, *, round_up: bool = False) -> Self:
        """Changes only the size. round_up: a partial window counts, too."""
        rounding = ceil if round_up else floor
        self.size = _sizes(self.size, (kernel, kernel), stride, _pair(padding), rounding)
        return self

    def pool_to(self, size: int) -> Self:
        self.size = (size, size)
        return self

    def shuffle_up(self, factor: int) -> Self:
        """Channels become pixels (sub-pixel convolution's second half)."""
        self.channels //= factor * factor
        self.size = (self.size[0] * factor, self.size[1] * factor)
        return self

    def linear(self, outputs: int) -> Self:
        """On the flattened input."""
        inputs = self.channels * prod(self.size)
        layer = linear("linear", inputs, outputs, rows=self.rows)
        self._append(layer.name, layer.shapes, layer.flops)
        self.channels, self.size = outputs, (1, 1)
        return self

    def fork(self) -> "Stack":
        """Another path from here; its layers follow the present ones in the list."""
        other = Stack(self.channels, *self.size, layers=self.layers, rows=self.rows)
        other.frozen = self.frozen
        return other

    def beside(self, *paths: "Callable[[Stack], Stack]") -> Self:
        """Several paths from here; their outputs are concatenated as channels."""
        ends = [path(self.fork()) for path in paths]
        assert len({end.size for end in ends}) == 1, f"paths of different sizes: {[end.size for end in ends]}"
        self.channels, self.size = sum(end.channels for end in ends), ends[0].size
        return self

    def _append(self, name: str, shapes: tuple[tuple[int, ...], ...], flops: int) -> None:
        self.layers.append(Layer(f"{name}{len(self.layers)}", shapes, flops, self.frozen))


def _pair(value: int | tuple[int, int]) -> tuple[int, int]:
    return value if isinstance(value, tuple) else (value, value)


def _sizes(
    size: tuple[int, int],
    kernel: tuple[int, int],
    stride: int,
    padding: tuple[int, int],
    rounding: Callable[[float], int],
) -> tuple[int, int]:
    high, wide = (
        rounding((length + 2 * around - window) / stride) + 1
        for length, window, around in zip(size, kernel, padding, strict=True)
    )
    return high, wide
