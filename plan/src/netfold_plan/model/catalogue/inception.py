"""GoogLeNet and Inception v3, as torchvision defines them, and Inception v4 (Szegedy et al. 2016).

Without auxiliary classifiers: tf_cnn_benchmarks, the source of the published speeds, trains without them.
"""

from collections.abc import Callable
from typing import Any

from netfold_plan.model.catalogue.layers import Layer, Stack

_CLASSES = 1000
# Kernel, stride and padding of convolutions that keep the size.
_SAME_3, _SAME_5 = (3, 1, 1), (5, 1, 2)
_FLAT_3, _TALL_3 = ((1, 3), 1, (0, 1)), ((3, 1), 1, (1, 0))
_FLAT_7, _TALL_7 = ((1, 7), 1, (0, 3)), ((7, 1), 1, (3, 0))

_Path = Callable[[Stack], Stack]


def googlenet() -> list[Layer]:
    """With batch norm, 224 x 224. The "5 x 5" path has 3 x 3 convolutions, as torchvision's does."""
    image = Stack(3, 224, 224)
    image.conv_norm(64, 7, 2, 3).pool(3, 2, round_up=True)
    image.conv_norm(64, 1).conv_norm(192, 3, 1, 1).pool(3, 2, round_up=True)
    _google_block(image, 64, 96, 128, 16, 32, 32)
    _google_block(image, 128, 128, 192, 32, 96, 64)
    image.pool(3, 2, round_up=True)
    _google_block(image, 192, 96, 208, 16, 48, 64)
    _google_block(image, 160, 112, 224, 24, 64, 64)
    _google_block(image, 128, 128, 256, 24, 64, 64)
    _google_block(image, 112, 144, 288, 32, 64, 64)
    _google_block(image, 256, 160, 320, 32, 128, 128)
    image.pool(2, 2, round_up=True)
    _google_block(image, 256, 160, 320, 32, 128, 128)
    _google_block(image, 384, 192, 384, 48, 128, 128)
    return image.pool_to(1).linear(_CLASSES).layers


def _google_block(image: Stack, one: int, into3: int, three: int, into5: int, five: int, pooled: int) -> None:
    image.beside(
        _convs((one, 1)),
        _convs((into3, 1), (three, *_SAME_3)),
        _convs((into5, 1), (five, *_SAME_3)),
        _convs((pooled, 1)),
    )


def inception3() -> list[Layer]:
    """299 x 299."""
    image = Stack(3, 299, 299)
    image.conv_norm(32, 3, 2).conv_norm(32, 3).conv_norm(64, 3, 1, 1).pool(3, 2)
    image.conv_norm(80, 1).conv_norm(192, 3).pool(3, 2)
    for pooled in (32, 64, 64):
        image.beside(
            _convs((64, 1)),
            _convs((48, 1), (64, *_SAME_5)),
            _convs((64, 1), (96, *_SAME_3), (96, *_SAME_3)),
            _convs((pooled, 1)),
        )
    image.beside(_convs((384, 3, 2)), _convs((64, 1), (96, *_SAME_3), (96, 3, 2)), _pool)
    for inner in (128, 160, 160, 192):
        image.beside(
            _convs((192, 1)),
            _convs((inner, 1), (inner, *_FLAT_7), (192, *_TALL_7)),
            _convs((inner, 1), (inner, *_TALL_7), (inner, *_FLAT_7), (inner, *_TALL_7), (192, *_FLAT_7)),
            _convs((192, 1)),
        )
    image.beside(_convs((192, 1), (320, 3, 2)), _convs((192, 1), (192, *_FLAT_7), (192, *_TALL_7), (192, 3, 2)), _pool)
    for _ in range(2):
        image.beside(_convs((320, 1)), _cross(384, (384, 1)), _cross(384, (448, 1), (384, *_SAME_3)), _convs((192, 1)))
    return image.pool_to(1).linear(_CLASSES).layers


def inception4() -> list[Layer]:
    """299 x 299."""
    image = Stack(3, 299, 299)
    image.conv_norm(32, 3, 2).conv_norm(32, 3).conv_norm(64, 3, 1, 1)
    image.beside(_pool, _convs((96, 3, 2)))
    image.beside(_convs((64, 1), (96, 3)), _convs((64, 1), (64, *_FLAT_7), (64, *_TALL_7), (96, 3)))
    image.beside(_convs((192, 3, 2)), _pool)
    for _ in range(4):
        image.beside(
            _convs((96, 1)),
            _convs((64, 1), (96, *_SAME_3)),
            _convs((64, 1), (96, *_SAME_3), (96, *_SAME_3)),
            _convs((96, 1)),
        )
    image.beside(_convs((384, 3, 2)), _convs((192, 1), (224, *_SAME_3), (256, 3, 2)), _pool)
    for _ in range(7):
        image.beside(
            _convs((384, 1)),
            _convs((192, 1), (224, *_FLAT_7), (256, *_TALL_7)),
            _convs((192, 1), (192, *_TALL_7), (224, *_FLAT_7), (224, *_TALL_7), (256, *_FLAT_7)),
            _convs((128, 1)),
        )
    image.beside(_convs((192, 1), (192, 3, 2)), _convs((256, 1), (256, *_FLAT_7), (320, *_TALL_7), (320, 3, 2)), _pool)
    for _ in range(3):
        image.beside(
            _convs((256, 1)),
            _cross(256, (384, 1)),
            _cross(256, (384, 1), (448, *_TALL_3), (512, *_FLAT_3)),
            _convs((256, 1)),
        )
    return image.pool_to(1).linear(_CLASSES).layers


def _convs(*each: tuple[Any, ...]) -> _Path:
    """A path of convolutions with batch norm, each with the arguments of `Stack.conv_norm`."""

    def path(stack: Stack) -> Stack:
        for arguments in each:
            stack.conv_norm(*arguments)
        return stack

    return path


def _cross(outputs: int, *before: tuple[Any, ...]) -> _Path:
    """A path of convolutions, then 1 x 3 beside 3 x 1 of their output."""
    return lambda path: _convs(*before)(path).beside(_convs((outputs, *_FLAT_3)), _convs((outputs, *_TALL_3)))


def _pool(path: Stack) -> Stack:
    return path.pool(3, 2)
