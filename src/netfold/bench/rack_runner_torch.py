"""The groups that `rack_runner_rank.py` opens on the torch backends, gloo and netfold: of some of the ranks, as
told.
"""

import os
from typing import Any

import numpy as np
import torch.distributed as dist

from netfold import Options
from netfold.bench.backends import BackendName
from netfold.bench.backends.torch_backend import TorchBackend, TorchWorld
from netfold.switch_protocol import control_messages


class TorchGroups(TorchWorld):
    def __init__(self) -> None:
        # Which groups have a switch, the ways say.
        self._switch = os.environ.pop("NETFOLD_SWITCH", None)
        super().__init__()
        self.versions |= {"numpy": str(np.__version__)}

    def group(self, workers: int, options: dict[str, str] | None, payload_bytes: int | None) -> TorchBackend:
        """Of the first `workers` ranks; the others must call too. Fields as Way's."""
        ranks = list(range(workers))
        if options is None:
            return TorchBackend(dist.new_group(ranks, backend="gloo"), BackendName("gloo", "torch", "gloo", ""))
        if options.get("switch") == "nearest":
            options["switch"] = str(self._switch)
        tried = control_messages.PAYLOAD_CANDIDATES
        if payload_bytes is not None:
            # A job's packets are as long as its worker with the shortest says.
            control_messages.PAYLOAD_CANDIDATES = (payload_bytes,)  # type: ignore[assignment]
        told: Any = options
        group = dist.new_group(ranks, backend="netfold", pg_options=Options(**told))
        if self.rank < workers:
            dist.barrier(group=group)
        control_messages.PAYLOAD_CANDIDATES = tried
        return TorchBackend(group, BackendName("netfold", "torch", "netfold", ""))
