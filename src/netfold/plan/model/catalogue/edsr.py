"""EDSR (Lim et al. 2017), to four times the size, on patches of 48 x 48 as there."""

from netfold.plan.model.catalogue.layers import Layer, Stack

PATCH = 48


def edsr(blocks: int, width: int) -> list[Layer]:
    """Residual blocks without batch norm, then twice a convolution to four times the channels, shuffled to pixels."""
    image = Stack(3, PATCH, PATCH).conv(width, 3, 1, 1)
    for _ in range(blocks):
        image.conv(width, 3, 1, 1).conv(width, 3, 1, 1)
    image.conv(width, 3, 1, 1)
    for _ in range(2):
        image.conv(4 * width, 3, 1, 1).shuffle_up(2)
    return image.conv(3, 3, 1, 1).layers
