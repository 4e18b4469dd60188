"""What `netfold plan --profile` predicts beside what was measured, in a rack. Needs root.

    .venv/bin/python bench/plan_profile.py [ROUNDS]      # 3

Two hosts train a perceptron of 3.5 million weights by DDP over netfold, with links of three rates, each recorded. Every
profile is put on its own network, and on the networks that the other two show. Writes bench/results/plan_profile.md.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from netfold.bench.machine import spoken
from netfold.plan.cluster import Cluster
from netfold.plan.job import Job, Split
from netfold.plan.request.profile import ProfiledJob, read_profile
from netfold.plan.step import predict
from netfold.rack import Rack
from netfold.rack.job import run_on_every_host
from netfold.rack.processes import exit_on_signals

RATES, HOSTS, STEPS = ("1gbit", "500mbit", "200mbit"), 2, 60
RESULT = Path(__file__).parent / "results" / "plan_profile.md"


def train() -> None:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    dist.init_process_group("netfold")
    torch.manual_seed(0)
    hidden = [layer for _ in range(6) for layer in (nn.Linear(768, 768), nn.ReLU())]
    model = DistributedDataParallel(nn.Sequential(*hidden, nn.Linear(768, 10)), bucket_cap_mb=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    pictures, classes = torch.randn(256, 768), torch.randint(0, 10, (256,))
    for _ in range(STEPS):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(pictures), classes).backward()
        optimizer.step()
    dist.destroy_process_group()


def recorded(rate: str, folder: Path) -> ProfiledJob:
    command = ["env", f"NETFOLD_PROFILE={folder}", "OMP_NUM_THREADS=1", sys.executable, __file__, "train"]
    said: list[str] = []
    with Rack(HOSTS, rate, "0%") as rack:
        if run_on_every_host(rack, command, said.append, switch=False):
            raise SystemExit(f"at {rate} the job failed: {said[-1:]}")
    return read_profile(folder)


def step_s(seen: ProfiledJob, network: Cluster) -> float:
    job = Job(HOSTS, split=Split(data=HOSTS), precision=seen.precision, overlap=True)
    return predict(seen.model, network, job).step_s


def main(rounds: int) -> None:
    before = os.getloadavg()[0]
    lines = ["| round | profile of | on the network of | predicted | measured | error |", "|--:|--|--|--:|--:|--:|"]
    own: list[float] = []
    others: list[float] = []
    for number in range(1, rounds + 1):
        with tempfile.TemporaryDirectory(prefix="netfold-plan-profile-") as folder:
            found = {rate: recorded(rate, Path(folder) / rate) for rate in RATES}
        for rate, seen in found.items():
            for other, measured in found.items():
                if isinstance(measured.network, str):
                    lines.append(f"| {number} | {rate} | {other} | - | - | {measured.network} |")
                    continue
                predicted, took = step_s(seen, measured.network), measured.model.step_s
                error = predicted / took - 1
                (own if rate == other else others).append(error)
                ends = f"{1e3 * predicted:.0f} ms | {1e3 * took:.0f} ms | {100 * error:+.1f}%"
                lines.append(f"| {number} | {rate} | {other} | {ends} |")
    text = [
        "# A profile's predictions beside measured steps",
        "",
        f"`bench/plan_profile.py {rounds}`: two hosts of a rack, a perceptron of 3.5 million weights by DDP over",
        "netfold, links of three rates. *Measured* is a step, the mean of its ranks and the median of some 55. A",
        "profile of one rate is put on the network that another profile's all_reduces show.",
        "",
        f"- On its own network: mean error {_mean(own)}.",
        f"- On another's: mean error {_mean(others)}.",
        "",
        *lines,
        "",
        spoken((before, os.getloadavg()[0])),
    ]
    RESULT.write_text("\n".join(text) + "\n", encoding="utf-8")
    print("\n".join(text))


def _mean(errors: list[float]) -> str:
    if not errors:
        return "not known"
    size = sum(map(abs, errors)) / len(errors)
    return f"{100 * size:.1f}% ({100 * min(errors):+.1f} to {100 * max(errors):+.1f}%, {len(errors)} predictions)"


if __name__ == "__main__":
    if sys.argv[1:] == ["train"]:
        train()
    else:
        with exit_on_signals():
            main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
