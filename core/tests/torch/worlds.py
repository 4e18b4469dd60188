"""One world of processes runs all cases of a test file in all modes, because importing torch takes seconds. Each test
checks its own case."""

from __future__ import annotations

import functools
import importlib
import os
import traceback
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

from ranks import run_ranks, running_switch, values

SIZE = 4
# torch calls netfold through its dispatcher and its own ProcessGroup, as it calls gloo.
BY_DISPATCHER = tuple(int(part) for part in version("torch").split(".")[:2]) >= (2, 14) if find_spec("torch") else False

# dist, rank, size, folder
Case = Callable[[Any, int, int, str], None]
# What a mode sets. "switch" stands for the address of one.
MODES: dict[str, dict[str, str]] = {
    "auto": {},
    "ring": {"NETFOLD_ALGORITHM": "ring"},
    "switch": {"NETFOLD_SWITCH": "switch"},
    "switch_bf16": {"NETFOLD_SWITCH": "switch", "NETFOLD_WIRE_DTYPE": "bf16"},
}
VARIABLES = sorted({variable for mode in MODES.values() for variable in mode})

Found = dict[str, dict[str, str]]  # mode -> case -> "" or what went wrong


def _run(rank: int, size: int, folder: str, module: str, modes: tuple[str, ...], endpoint: str) -> Found:
    """Every mode in a group of its own, one after the other in the same processes."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    cases: dict[str, Case] = importlib.import_module(module).CASES
    found: Found = {}
    for mode in modes:
        for variable in VARIABLES:
            os.environ.pop(variable, None)
        os.environ.update({name: endpoint if word == "switch" else word for name, word in MODES[mode].items()})
        os.makedirs(f"{folder}/{mode}", exist_ok=True)
        init_method = f"file://{folder}/store-{mode}"
        dist.init_process_group("netfold", init_method=init_method, rank=rank, world_size=size)
        try:
            found[mode] = _run_cases(cases, dist, rank, size, f"{folder}/{mode}")
        finally:
            # A case that made a new group may have failed between the old one and the new one.
            if dist.is_initialized():
                dist.destroy_process_group()
    return found


def _run_cases(cases: dict[str, Case], dist: Any, rank: int, size: int, folder: str) -> dict[str, str]:
    """Stop after a failure, since the group has failed."""
    found = dict.fromkeys(cases, "not run, since a case before it failed")
    for name, function in cases.items():
        try:
            function(dist, rank, size, folder)
            found[name] = ""
        except Exception:
            found[name] = traceback.format_exc()
            break
    return found


@functools.cache
def world(module: str, modes: tuple[str, ...]) -> list[Found]:
    with running_switch() as switch:
        return values(run_ranks(_run, SIZE, module, modes, switch.endpoint, timeout_s=150))


def check(module: str, modes: tuple[str, ...], mode: str, name: str) -> None:
    """Fail with the first rank's traceback."""
    for rank, found in enumerate(world(module, modes)):
        assert not found[mode][name], f"rank {rank}: {found[mode][name]}"
