"""The ProcessGroup for torch older than 2.14."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.torch


def test_a_direct_synchronous_all_gather_of_nccl_returns_a_completed_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NCCL's method returns None for a synchronous call, and the operator must return a box (FSDP2 calls it)."""
    import torch
    import torch.distributed as dist

    from netfold.torch.factory import takes_backends

    if takes_backends:
        pytest.skip(f"torch {torch.__version__} takes netfold as a Backend; no operator is overridden")
    from netfold.torch import legacy

    class Nccl:
        def _allgather_base(self, output: Any, input: Any, opts: Any) -> None:
            output.copy_(input.repeat(2))
            assert not opts.asyncOp

    class Group:
        def _get_backend(self, device: Any) -> Nccl:
            return Nccl()

    monkeypatch.setattr(dist.ProcessGroup, "unbox", staticmethod(lambda box: Group()))
    output, box = legacy._all_gather_base(torch.empty(4), torch.tensor([1.0, 2.0]), None, async_op=False)
    assert output.tolist() == [1, 2, 1, 2]
    assert dist.Work.unbox(box).wait()
