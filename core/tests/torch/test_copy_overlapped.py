"""Calls on device memory run in chunks: inputs that an output overlaps by a part are cloned before."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    ("begin", "is_cloned"),
    [
        pytest.param(0, False, id="the same memory"),
        pytest.param(4, False, id="beside it"),
        pytest.param(1, True, id="a part"),
    ],
)
def test_an_input_is_cloned_where_an_output_overlaps_a_part_of_it(begin: int, is_cloned: bool) -> None:
    import torch

    from netfold.torch.calls import copy_call, copy_overlapped

    whole = torch.arange(12)
    output, given = whole[:4], whole[begin : begin + 4]
    call = copy_call("all_gather", [given], [output, whole[8:]])
    copy_overlapped(call)
    assert (call.inputs[0].data_ptr() != given.data_ptr()) == is_cloned
    assert torch.equal(call.inputs[0], given)
