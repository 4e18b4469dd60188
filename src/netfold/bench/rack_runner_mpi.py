"""The groups that `rack_runner_rank.py` opens in an MPI: communicators of some of the ranks."""

from typing import cast

from mpi4py import MPI

from netfold.bench.backends.mpi_backend import MpiBackend, MpiWorld


class MpiGroups(MpiWorld):
    def group(self, workers: int, options: None, payload_bytes: None) -> MpiBackend:
        """Of the first `workers` ranks; the others must call too. The rest is for netfold alone."""
        assert options is None and payload_bytes is None
        part = MPI.COMM_WORLD.Split(0 if self.rank < workers else MPI.UNDEFINED, self.rank)
        return MpiBackend(cast(MPI.Intracomm, part), in_place=True)
