"""torchft makes its groups itself, and again when a rank is lost: its own checks over netfold.

`make test-ecosystem` makes the environment.
"""

from __future__ import annotations

import concurrent.futures
import os
import re
import sys
import unittest
from datetime import timedelta
from pathlib import Path
from typing import Any

import load
import pytest

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.ecosystem

# The fourth process that the example starts is the new replica: it starts after the others would have made 30 steps.
LATE = """
import os, sys, time
if "--multiprocessing-fork" in sys.orig_argv:
    started = os.open({count!r}, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(started, b".")
    if os.fstat(started).st_size > 3:
        time.sleep(10)
"""
EXAMPLE = Path(__file__).parents[3] / "examples" / "ecosystem" / "torchft_reconfigure.py"


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
            return [each.result(load.seconds(60)) for each in [pool.submit(function, rank) for rank in ranks]]

    def test_torchfts_checks_of_collectives_pass(self) -> None:
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

    def test_torchft_reconfigures_a_group_that_torch_made(self) -> None:
        """The nightly's case: sizes 3, 2 and 3 with other orders, then an abort; the group stays one object."""
        if not hasattr(torch.distributed.ProcessGroup, "reconfigure"):
            pytest.skip(f"torch {torch.__version__} has no reconfigure: 2.15 has")
        theirs = pytest.importorskip("torchft.reconfigure_test", reason="only torchft's nightly has these tests")
        store = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        torch.multiprocessing.spawn(theirs._resize_worker, args=(store.port, "netfold"), nprocs=3)

    def test_a_replica_is_killed_and_another_one_takes_its_place(self, tmp_path: Path) -> None:
        """torchft's Manager on a group that torch made. All replicas end with the same weights.

        The new replica is late by 10 s: the other two wait for it, and do not end without it.
        """
        if not hasattr(torch.distributed.ProcessGroup, "reconfigure"):
            pytest.skip(f"torch {torch.__version__} has no reconfigure: 2.15 has")
        pytest.importorskip("torchft.reconfigure_test", reason="only torchft's nightly takes a group of torch's")
        (tmp_path / "sitecustomize.py").write_text(LATE.format(count=str(tmp_path / "started")))
        path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
        # Unbuffered: the replicas' last lines, printed at the same moment, stay lines.
        env = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
        ended = load.run([sys.executable, EXAMPLE], 240, env=env)
        assert ended.returncode == 0, ended.stderr[-3000:]
        found = re.findall(r"replica (\d): sizes \[(.*)\], norm of the weights (\S+)", ended.stdout)
        assert len({weights for *_, weights in found}) == 1, ended.stdout
        sizes = {replica: text.replace(", ", "") for replica, text, _ in found}
        # The first two may begin without the third. 2 is without the one that was killed.
        for replica in "01":
            assert re.fullmatch("2*3+2+3+", sizes[replica]), ended.stdout
        assert (tmp_path / "started").read_text() == "....", "the fourth process was not the last"
        assert re.fullmatch("3+", sizes["2"]), sizes

    def test_torchfts_suite_for_process_groups_passes(self) -> None:
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
