"""Frameworks that take a backend by name, and torchft, which makes its groups itself; each where it is installed.

`pip install '.[ecosystem]'` brings them.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import subprocess
import sys
import unittest
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.torch

SIZE = 2

LIGHTNING = """
import json, sys, torch, torch.distributed as dist
import lightning as L
from lightning.pytorch.strategies import DDPStrategy

class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def training_step(self, batch, index):
        return self.layer(batch[0]).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
    def on_train_end(self):
        weights = [p.detach().flatten().tolist() for p in self.parameters()]
        json.dump([dist.get_backend(), weights], open(f"{sys.argv[1]}/{dist.get_rank()}", "w"))

torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(16, 4))
L.Trainer(accelerator="cpu", devices=2, strategy=DDPStrategy(process_group_backend="netfold"), max_epochs=1,
          logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False).fit(
    Model(), torch.utils.data.DataLoader(data, batch_size=4))
"""

ACCELERATE = """
import json, sys, torch, torch.distributed as dist
from accelerate import Accelerator

torch.manual_seed(0)
dist.init_process_group("netfold")  # the line; without it Accelerate takes gloo on CPU, whatever it was asked for
accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(16, 4)), batch_size=4)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
for (batch,) in data:
    optimizer.zero_grad()
    accelerator.backward(model(batch).square().mean())
    optimizer.step()
total = accelerator.reduce(torch.tensor([1.0 + accelerator.process_index]), reduction="sum")
assert total.item() == 3, total
weights = [p.detach().flatten().tolist() for p in model.parameters()]
json.dump([dist.get_backend(), weights], open(f"{sys.argv[1]}/{dist.get_rank()}", "w"))
accelerator.end_training()
"""


@pytest.mark.parametrize(("name", "script"), [("lightning", LIGHTNING), ("accelerate", ACCELERATE)])
def test_a_framework_trains_with_the_backend_named_in_one_line(name: str, script: str, tmp_path: Path) -> None:
    pytest.importorskip(name)
    (tmp_path / "script.py").write_text(script)
    (tmp_path / "found").mkdir()
    ended = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(SIZE),
            str(tmp_path / "script.py"), str(tmp_path / "found"),
        ],
        capture_output=True,
        text=True,
        timeout=180,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-3000:]
    found = [json.loads((tmp_path / "found" / str(rank)).read_text()) for rank in range(SIZE)]
    assert found[0][0] == "netfold"
    assert found[0] == found[1], "the same weights on both ranks"


class TestTorchft:
    """Three ranks as threads of one process, as torchft's own tests have them."""

    size = 3

    def kind(self) -> Any:
        """A process group that can be made again, on netfold."""
        torchft = pytest.importorskip("torchft.process_group")

        import netfold.torch

        class ProcessGroupNetfold(torchft.ProcessGroupWrapper):  # type: ignore[misc, name-defined]
            def _create_pg(self, store: Any, rank: int, world_size: int) -> Any:
                return netfold.torch.new_process_group(store, rank, world_size, timeout=self._timeout)

            def _opts_hook(self, opts: Any) -> Any:
                if hasattr(opts, "timeout"):
                    opts.timeout = self._timeout
                return opts

        return ProcessGroupNetfold

    def groups(self) -> tuple[Any, list[Any]]:
        kind = self.kind()
        from torch.distributed import TCPStore

        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        return store, [kind(timeout=timedelta(seconds=20)) for _ in range(self.size)]

    def configure(self, group: Any, address: str, rank: int, size: int) -> None:
        torchft = pytest.importorskip("torchft.process_group")
        if hasattr(torchft, "reconfigure_with_store"):  # the nightly's way
            torchft.reconfigure_with_store(group, address, rank, size)
        else:
            group.configure(address, "0", rank, size)

    def together(self, function: Any, ranks: range) -> list[Any]:
        with concurrent.futures.ThreadPoolExecutor(self.size) as pool:
            return [each.result(60) for each in [pool.submit(function, rank) for rank in ranks]]

    def test_its_own_checks_of_collectives_pass(self) -> None:
        store, groups = self.groups()
        pytest.importorskip("parameterized", reason="torchft's tests need it")
        theirs = pytest.importorskip("torchft.process_group_test")

        def run(rank: int) -> None:
            for name in (
                "allgather", "allgather_into_tensor_coalesced", "allreduce", "allreduce_coalesced", "alltoall",
                "broadcast", "broadcast_one", "barrier", "reduce_scatter", "reduce_scatter_tensor_coalesced",
            ):  # fmt: skip
                getattr(theirs, f"run_{name}_test")(groups[rank], rank, torch.tensor([rank + 1]))

        self.together(
            lambda rank: self.configure(groups[rank], f"127.0.0.1:{store.port}/own", rank, self.size), range(self.size)
        )
        self.together(run, range(self.size))
        for group in groups:
            group.abort(errored=False)

    def test_a_group_is_made_again_without_the_rank_that_was_lost(self) -> None:
        store, groups = self.groups()

        def run(rank: int) -> list[float]:
            found = []
            for quorum, size in enumerate((3, 3, 2)):
                if rank < size:
                    self.configure(groups[rank], f"127.0.0.1:{store.port}/quorum-{quorum}", rank, size)
                    tensor = torch.ones(1000)
                    groups[rank].allreduce([tensor], torch.distributed.ReduceOp.SUM).wait(timedelta(seconds=20))
                    found.append(tensor[-1].item())
                else:
                    groups[rank].abort(errored=False)
            return found

        assert self.together(run, range(3)) == [[3, 3, 2], [3, 3, 2], [3, 3]]
        for group in groups:
            group.abort(errored=False)

    def test_its_own_suite_for_process_groups_passes(self) -> None:
        """The nightly's, collectives and what follows the loss of a rank, in the class that it has for gloo."""
        kind = self.kind()
        theirs = pytest.importorskip("torchft.process_group_test")
        if not hasattr(theirs, "reconfigure_with_store"):
            pytest.skip("only torchft's nightly has this suite")

        class Suite(theirs.NormalGlooMultiPgTest):  # type: ignore[misc, name-defined]
            @classmethod
            def _create_pg(cls, backend: str) -> Any:
                return kind(timeout=timedelta(seconds=10))

            def assertRaisesRegex(self, kind: Any, wording: str, *rest: Any) -> Any:  # noqa: N802 - unittest's name
                # What it expects is gloo's and NCCL's wording; netfold has its own for the same events.
                return super().assertRaisesRegex(kind, f"{wording}|closed the group|gave up on the group", *rest)

        result = unittest.TestResult()
        unittest.defaultTestLoader.loadTestsFromTestCase(Suite).run(result)
        assert result.testsRun >= 16
        assert not result.errors and not result.failures, [*result.errors, *result.failures][0][1]
