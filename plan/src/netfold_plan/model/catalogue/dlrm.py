"""DLRM (Naumov et al. 2019) with the sizes that MLPerf trains on Criteo's terabyte.

The two perceptrons are data parallel: their gradients are reduced. The embedding tables are spread over the ranks. An
all_to_all in the forward pass sends the values that each rank looked up to the ranks of the samples, and another one
sends their gradients back. The tables (some 100 GB) send nothing and are not part of the replay.
"""

from itertools import pairwise

from netfold_plan.model.catalogue.layers import Layer, linear

TABLES = 26
WIDTH = 128
_BOTTOM = (13, 512, 256, WIDTH)
# All pairs of the 26 vectors and the bottom's output, and that output itself.
_TOP = ((TABLES + 1) * TABLES // 2 + WIDTH, 1024, 1024, 512, 256, 1)
# The first layer that needs the looked-up values.
FIRST_AFTER_LOOKUP = "interaction"


def dlrm() -> list[Layer]:
    bottom = [linear(f"bottom{index}", *sizes) for index, sizes in enumerate(pairwise(_BOTTOM))]
    pairs = Layer("interaction", (), 2 * (TABLES + 1) ** 2 * WIDTH)
    top = [linear(f"top{index}", *sizes) for index, sizes in enumerate(pairwise(_TOP))]
    return [*bottom, pairs, *top]
