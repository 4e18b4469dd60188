"""AlexNet, VGG and ResNet, as torchvision defines them, for ImageNet's 1000 classes; and EDSR."""

from netfold_plan.model.catalogue.layers import Layer, Stack

_CLASSES = 1000
# Convolutions of each of the five stages (Simonyan and Zisserman 2014, table 1: A, D, E).
_VGG = {11: (1, 1, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}
# Blocks of each of the four stages (He et al. 2015, table 1).
_RESNET = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}


def alexnet() -> list[Layer]:
    """Krizhevsky 2014 (one tower), 224 x 224."""
    image = Stack(3, 224, 224)
    image.conv(64, 11, 4, 2).pool(3, 2).conv(192, 5, 1, 2).pool(3, 2)
    image.conv(384, 3, 1, 1).conv(256, 3, 1, 1).conv(256, 3, 1, 1).pool(3, 2)
    return image.linear(4096).linear(4096).linear(_CLASSES).layers


def vgg(depth: int) -> list[Layer]:
    """Without batch norm, 224 x 224."""
    image = Stack(3, 224, 224)
    for convolutions, channels in zip(_VGG[depth], (64, 128, 256, 512, 512), strict=True):
        for _ in range(convolutions):
            image.conv(channels, 3, 1, 1)
        image.pool(2, 2)
    return image.linear(4096).linear(4096).linear(_CLASSES).layers


def resnet(depth: int) -> list[Layer]:
    """With bottlenecks; the stride is on the 3 x 3 convolution (version 1.5), 224 x 224."""
    image = Stack(3, 224, 224)
    image.conv_norm(64, 7, 2, 3).pool(3, 2, 1)
    for stage, blocks in enumerate(_RESNET[depth]):
        for block in range(blocks):
            bottleneck(image, 64 << stage, stride=2 if stage > 0 and block == 0 else 1)
    return image.pool_to(1).linear(_CLASSES).layers


def edsr(blocks: int, width: int) -> list[Layer]:
    """EDSR (Lim et al. 2017) to four times the size, on its patches of 48 x 48.

    Residual blocks without batch norm, then twice a convolution to four times the channels, shuffled to pixels.
    """
    image = Stack(3, 48, 48).conv(width, 3, 1, 1)
    for _ in range(blocks):
        image.conv(width, 3, 1, 1).conv(width, 3, 1, 1)
    image.conv(width, 3, 1, 1)
    for _ in range(2):
        image.conv(4 * width, 3, 1, 1).shuffle_up(2)
    return image.conv(3, 3, 1, 1).layers


def bottleneck(image: Stack, width: int, stride: int, *, norm: bool = True) -> None:
    """1 x 1, 3 x 3 and 1 x 1 to four times the width, beside a shortcut. norm: whether batch norm has parameters."""
    shortcut = image.fork()
    for outputs, kernel, step, padding in ((width, 1, 1, 0), (width, 3, stride, 1), (4 * width, 1, 1, 0)):
        image.conv(outputs, kernel, step, padding, bias=False)
        if norm:
            image.norm()
    if (shortcut.channels, shortcut.size) != (image.channels, image.size):
        shortcut.conv(4 * width, 1, stride, bias=False)
        if norm:
            shortcut.norm()
