"""Test whether ranks on this host reach each other's GPU memory: two ranks try it, as a job would.

python -m netfold.torch.device.selftest
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import timedelta

_SIZE = 2
_COUNT = 1 << 20
_DEADLINE_S = 120.0
_MASK = "CUDA_VISIBLE_DEVICES"


def run_selftest() -> tuple[list[str], bool]:
    """Run the test. Returns lines of text, and whether ranks reached each other's memory in every case."""
    import torch

    if not torch.cuda.is_available():
        built = "finds no CUDA device" if torch.backends.cuda.is_built() else "was built without CUDA"  # type: ignore[no-untyped-call]
        return [f"no GPU: IPC disabled because torch {torch.__version__} {built}"], False
    from netfold.torch.device.cuda import CudaApi

    uuids = list(CudaApi().visible())
    mask = os.environ.get(_MASK)
    lines = [f"GPUs that this process sees ({_MASK}={mask}):" if mask else "GPUs that this process sees:"]
    lines += [
        f"  {number}: {torch.cuda.get_device_properties(number).name}, {uuid}" for number, uuid in enumerate(uuids)
    ]
    fine = True
    for what, masks in _cases(uuids):
        result, works = _try(masks)
        lines.append(f"two ranks {what}: {result}")
        fine = fine and works
    return lines, fine


def _cases(uuids: Sequence[str]) -> list[tuple[str, list[str]]]:
    """The cases: a description, and each rank's CUDA_VISIBLE_DEVICES ("": unchanged). A rank uses its last device."""
    first, other = uuids[0], uuids[-1]
    if first == other:
        # Keep this process's setting: the UUID from CUDA does not select a part of a GPU (MIG).
        return [("on one GPU", ["", ""])]
    return [
        ("on two GPUs that both see", [f"{other},{first}", f"{first},{other}"]),
        ("on two GPUs, each of which sees its own", [first, other]),
    ]


def _try(masks: Sequence[str]) -> tuple[str, bool]:
    with tempfile.TemporaryDirectory(prefix="netfold-trial-") as folder:
        ranks = [
            subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", "netfold.torch.device.selftest", str(rank), folder],
                env=_environment(mask),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank, mask in enumerate(masks)
        ]
        try:
            outputs = [rank.communicate(timeout=_DEADLINE_S) for rank in ranks]
        except subprocess.TimeoutExpired:
            return f"no answer within {_DEADLINE_S:g} s", False
        finally:
            for rank in ranks:
                rank.kill()
                rank.communicate()
    for rank, (_, error) in zip(ranks, outputs, strict=True):
        if rank.returncode:
            return (error.strip().splitlines() or ["a rank died without an error message"])[-1], False
    text = outputs[0][0].strip()
    return text, "IPC disabled" not in text


def _environment(mask: str) -> Mapping[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("NETFOLD_")}
    return {**kept, _MASK: mask} if mask else kept


def _be_rank(rank: int, folder: str) -> None:
    import torch
    import torch.distributed as dist

    from netfold.torch import device_paths

    device = torch.device("cuda", torch.cuda.device_count() - 1)
    torch.cuda.set_device(device)
    timeout = timedelta(seconds=_DEADLINE_S / 2)
    dist.init_process_group(
        "netfold", init_method=f"file://{folder}/store", rank=rank, world_size=_SIZE, timeout=timeout
    )
    tensor = torch.full((_COUNT,), float(rank + 1), device=device)
    dist.all_reduce(tensor)
    if not bool(tensor.eq(3).all()):
        raise RuntimeError(f"a sum of 1 and 2 is {float(tensor.min())} to {float(tensor.max())}")
    print(device_paths())
    dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1:]:
        _be_rank(int(sys.argv[1]), sys.argv[2])
    else:
        print("\n".join(run_selftest()[0]))
