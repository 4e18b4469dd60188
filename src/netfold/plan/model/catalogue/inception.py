"""GoogLeNet and Inception v3, as torchvision defines them, and Inception v4 (Szegedy et al. 2016).

heads: auxiliary classifiers. tf_cnn_benchmarks, the source of the published speeds, trains without them.
"""

from netfold.plan.model.catalogue.layers import Layer, Stack

_CLASSES = 1000
_FLAT, _TALL = (1, 7), (7, 1)
_ALONG, _ACROSS = (0, 3), (3, 0)


def googlenet(*, heads: bool = False) -> list[Layer]:
    """With batch norm, 224 x 224. The "5 x 5" path has 3 x 3 convolutions, as torchvision's does."""
    image = Stack(3, 224, 224)
    image.conv_norm(64, 7, 2, 3).pool(3, 2, round_up=True)
    image.conv_norm(64, 1).conv_norm(192, 3, 1, 1).pool(3, 2, round_up=True)
    _google_block(image, 64, 96, 128, 16, 32, 32)
    _google_block(image, 128, 128, 192, 32, 96, 64)
    image.pool(3, 2, round_up=True)
    _google_block(image, 192, 96, 208, 16, 48, 64)
    first = image.fork()
    _google_block(image, 160, 112, 224, 24, 64, 64)
    _google_block(image, 128, 128, 256, 24, 64, 64)
    _google_block(image, 112, 144, 288, 32, 64, 64)
    second = image.fork()
    _google_block(image, 256, 160, 320, 32, 128, 128)
    image.pool(2, 2, round_up=True)
    _google_block(image, 256, 160, 320, 32, 128, 128)
    _google_block(image, 384, 192, 384, 48, 128, 128)
    if heads:
        for head in (first, second):
            head.pool_to(4).conv_norm(128, 1).linear(1024).linear(_CLASSES)
    return image.pool_to(1).linear(_CLASSES).layers


def _google_block(image: Stack, one: int, into3: int, three: int, into5: int, five: int, pooled: int) -> None:
    image.beside(
        lambda path: path.conv_norm(one, 1),
        lambda path: path.conv_norm(into3, 1).conv_norm(three, 3, 1, 1),
        lambda path: path.conv_norm(into5, 1).conv_norm(five, 3, 1, 1),
        lambda path: path.conv_norm(pooled, 1),
    )


def inception3(*, heads: bool = False) -> list[Layer]:
    """299 x 299."""
    image = Stack(3, 299, 299)
    image.conv_norm(32, 3, 2).conv_norm(32, 3).conv_norm(64, 3, 1, 1).pool(3, 2)
    image.conv_norm(80, 1).conv_norm(192, 3).pool(3, 2)
    for pooled in (32, 64, 64):
        _v3_a(image, pooled)
    image.beside(
        lambda path: path.conv_norm(384, 3, 2),
        lambda path: path.conv_norm(64, 1).conv_norm(96, 3, 1, 1).conv_norm(96, 3, 2),
        lambda path: path.pool(3, 2),
    )
    for inner in (128, 160, 160, 192):
        _v3_c(image, inner)
    if heads:
        image.fork().pool(5, 3).conv_norm(128, 1).conv_norm(768, 5).linear(_CLASSES)
    image.beside(
        lambda path: path.conv_norm(192, 1).conv_norm(320, 3, 2),
        lambda path: (
            path.conv_norm(192, 1).conv_norm(192, _FLAT, 1, _ALONG).conv_norm(192, _TALL, 1, _ACROSS)
        ).conv_norm(192, 3, 2),
        lambda path: path.pool(3, 2),
    )
    for _ in range(2):
        image.beside(
            lambda path: path.conv_norm(320, 1),
            lambda path: _cross(path.conv_norm(384, 1), 384),
            lambda path: _cross(path.conv_norm(448, 1).conv_norm(384, 3, 1, 1), 384),
            lambda path: path.conv_norm(192, 1),
        )
    return image.pool_to(1).linear(_CLASSES).layers


def _v3_a(image: Stack, pooled: int) -> None:
    image.beside(
        lambda path: path.conv_norm(64, 1),
        lambda path: path.conv_norm(48, 1).conv_norm(64, 5, 1, 2),
        lambda path: path.conv_norm(64, 1).conv_norm(96, 3, 1, 1).conv_norm(96, 3, 1, 1),
        lambda path: path.conv_norm(pooled, 1),
    )


def _v3_c(image: Stack, inner: int) -> None:
    image.beside(
        lambda path: path.conv_norm(192, 1),
        lambda path: path.conv_norm(inner, 1).conv_norm(inner, _FLAT, 1, _ALONG).conv_norm(192, _TALL, 1, _ACROSS),
        lambda path: (
            path.conv_norm(inner, 1)
            .conv_norm(inner, _TALL, 1, _ACROSS)
            .conv_norm(inner, _FLAT, 1, _ALONG)
            .conv_norm(inner, _TALL, 1, _ACROSS)
            .conv_norm(192, _FLAT, 1, _ALONG)
        ),
        lambda path: path.conv_norm(192, 1),
    )


def inception4() -> list[Layer]:
    """299 x 299."""
    image = Stack(3, 299, 299)
    image.conv_norm(32, 3, 2).conv_norm(32, 3).conv_norm(64, 3, 1, 1)
    image.beside(lambda path: path.pool(3, 2), lambda path: path.conv_norm(96, 3, 2))
    image.beside(
        lambda path: path.conv_norm(64, 1).conv_norm(96, 3),
        lambda path: (
            path.conv_norm(64, 1).conv_norm(64, _FLAT, 1, _ALONG).conv_norm(64, _TALL, 1, _ACROSS).conv_norm(96, 3)
        ),
    )
    image.beside(lambda path: path.conv_norm(192, 3, 2), lambda path: path.pool(3, 2))
    for _ in range(4):
        image.beside(
            lambda path: path.conv_norm(96, 1),
            lambda path: path.conv_norm(64, 1).conv_norm(96, 3, 1, 1),
            lambda path: path.conv_norm(64, 1).conv_norm(96, 3, 1, 1).conv_norm(96, 3, 1, 1),
            lambda path: path.conv_norm(96, 1),
        )
    image.beside(
        lambda path: path.conv_norm(384, 3, 2),
        lambda path: path.conv_norm(192, 1).conv_norm(224, 3, 1, 1).conv_norm(256, 3, 2),
        lambda path: path.pool(3, 2),
    )
    for _ in range(7):
        _v4_b(image)
    image.beside(
        lambda path: path.conv_norm(192, 1).conv_norm(192, 3, 2),
        lambda path: (
            path.conv_norm(256, 1).conv_norm(256, _FLAT, 1, _ALONG).conv_norm(320, _TALL, 1, _ACROSS)
        ).conv_norm(320, 3, 2),
        lambda path: path.pool(3, 2),
    )
    for _ in range(3):
        image.beside(
            lambda path: path.conv_norm(256, 1),
            lambda path: _cross(path.conv_norm(384, 1), 256),
            lambda path: _cross(
                path.conv_norm(384, 1).conv_norm(448, (3, 1), 1, (1, 0)).conv_norm(512, (1, 3), 1, (0, 1)), 256
            ),
            lambda path: path.conv_norm(256, 1),
        )
    return image.pool_to(1).linear(_CLASSES).layers


def _v4_b(image: Stack) -> None:
    image.beside(
        lambda path: path.conv_norm(384, 1),
        lambda path: path.conv_norm(192, 1).conv_norm(224, _FLAT, 1, _ALONG).conv_norm(256, _TALL, 1, _ACROSS),
        lambda path: (
            path.conv_norm(192, 1)
            .conv_norm(192, _TALL, 1, _ACROSS)
            .conv_norm(224, _FLAT, 1, _ALONG)
            .conv_norm(224, _TALL, 1, _ACROSS)
            .conv_norm(256, _FLAT, 1, _ALONG)
        ),
        lambda path: path.conv_norm(128, 1),
    )


def _cross(path: Stack, outputs: int) -> Stack:
    """1 x 3 beside 3 x 1, of one input."""
    return path.beside(
        lambda flat: flat.conv_norm(outputs, (1, 3), 1, (0, 1)),
        lambda tall: tall.conv_norm(outputs, (3, 1), 1, (1, 0)),
    )
