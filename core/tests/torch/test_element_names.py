"""Ranks compare dtypes by name: every dtype has a name of its own, or is refused in a sentence."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.torch


def test_every_dtype_has_its_own_name_or_is_refused() -> None:
    import torch

    from netfold.communicator.group import ELEMENTS
    from netfold.torch.calls import copy_call, element_name

    names = {}
    for dtype in {each for each in vars(torch).values() if isinstance(each, torch.dtype)}:
        try:
            names[dtype] = element_name(torch.empty(2, dtype=dtype))
        except ValueError as error:
            assert "netfold does not send tensors of" in str(error) and "It sends" in str(error), error
            assert dtype.is_floating_point is False, dtype
    assert len(set(names.values())) == len(names) >= 20
    assert set(names.values()) <= set(ELEMENTS)
    assert {torch.bool, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8} <= set(names)

    quantized = torch.quantize_per_tensor(torch.ones(3), 0.5, 0, torch.qint8)
    with pytest.raises(ValueError, match="int_repr"):
        copy_call("broadcast", [], [quantized])
