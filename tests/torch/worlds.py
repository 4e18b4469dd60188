"""A world of processes that import torch is dear: it runs all cases of a test file, and each test asks for its own."""

from __future__ import annotations

import functools
import importlib
import traceback
from collections.abc import Callable
from typing import Any

from ranks import run_ranks, running_switch, values

SIZE = 4

# dist, rank, size, folder
Case = Callable[[Any, int, int, str], None]
# What a mode sets. "switch" stands for the address of one.
MODES: dict[str, dict[str, str]] = {
    "auto": {},
    "ring": {"NETFOLD_ALGORITHM": "ring"},
    "switch": {"NETFOLD_SWITCH": "switch"},
    "switch_bf16": {"NETFOLD_SWITCH": "switch", "NETFOLD_WIRE": "bf16"},
}


def _run_cases(rank: int, size: int, folder: str, module: str) -> dict[str, str]:
    """case -> "" or what went wrong. After a failure the group is no good: the rest is not run."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    cases: dict[str, Case] = importlib.import_module(module).CASES
    dist.init_process_group("netfold", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    found = {}
    try:
        for name, function in cases.items():
            try:
                function(dist, rank, size, folder)
                found[name] = ""
            except Exception:
                found[name] = traceback.format_exc()
                break
    finally:
        dist.destroy_process_group()
    return {name: found.get(name, "not run, since a case before it failed") for name in cases}


@functools.cache
def world(module: str, mode: str) -> list[dict[str, str]]:
    if "NETFOLD_SWITCH" not in MODES[mode]:
        return values(run_ranks(_run_cases, SIZE, module, env=MODES[mode], timeout_s=120))
    with running_switch() as switch:
        env = {**MODES[mode], "NETFOLD_SWITCH": switch.endpoint}
        return values(run_ranks(_run_cases, SIZE, module, env=env, timeout_s=120))


def check(module: str, mode: str, name: str) -> None:
    """Fails with the first rank's own traceback."""
    for rank, found in enumerate(world(module, mode)):
        assert not found[name], f"rank {rank}: {found[name]}"
