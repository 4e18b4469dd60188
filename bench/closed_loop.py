"""The planner's closed loop: what it says of the recipes in an emulated rack before they are run there, and what they
then take; as root:

    python bench/closed_loop.py [RECIPE ...]      # about seventeen minutes, and nothing else on the machine

Without names: all but edsr-large, whose 163 MB of gradients take ten minutes more.

All_reduces between two hosts by each way at each rate (`pair.py`) come first. Then for each recipe: its step on one
host with nobody to talk to (`one_host.py`); from both the predictions for 2, 4 and 8 hosts, by `netfold.plan.events`,
which are written down; and only then the runs. Ways take turns in the same processes. What is there already of other
recipes stays. Writes bench/results/closed_loop.json and .md.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from closed_loop_table import render

from netfold.bench.machine import spoken
from netfold.plan.cluster import Cluster
from netfold.plan.cluster.load import cluster_of
from netfold.plan.events import Conditions, simulate
from netfold.plan.job import Job, Split
from netfold.plan.model import TimedStep, timed_step_of
from netfold.plan.step import FITTED
from netfold.rack import Rack
from netfold.rack.link import BURST_BYTES
from netfold.rack.processes import DRAIN_S, exit_on_signals, follow, supervise
from netfold.tuning.fit import fit_link

HERE = Path(__file__).parent
RECIPES = HERE.parent / "recipes"
RESULT = HERE / "results" / "closed_loop.md"
KEPT = RESULT.with_suffix(".json")
HOSTS, RATES = (2, 4, 8), ("200mbit", "1gbit")
WIRES = {"gloo, ring": "f32", "netfold, ring": "f32", "in-network, f32": "f32", "in-network, bf16": "bf16"}
# Links are measured with all that comes before a collective's first byte in them.
CONSTANTS = replace(FITTED, collective_s=0.0)
# Of measuring at one place, all ways together: steps are as many as fit, within the bounds.
PLACE_S, FEWEST, MOST = 5.0, 2, 12
BY_NAME_ONLY = ("edsr-large",)
DEADLINE_S = 900


def main(names: Sequence[str]) -> None:
    recipes = [RECIPES / f"{name}.toml" for name in names] or [
        path for path in sorted(RECIPES.glob("*.toml")) if path.stem not in BY_NAME_ONLY
    ]
    kept: dict[str, Any] = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    pairs = {rate: between_two(rate) for rate in RATES}
    for recipe in recipes:
        load = os.getloadavg()[0]
        with tempfile.TemporaryDirectory() as folder:
            alone = Path(folder, "one_host.json")
            command = [sys.executable, str(HERE / "one_host.py"), str(recipe), str(alone)]
            subprocess.run(command, check=True, timeout=DEADLINE_S, env=_environment())
            found = json.loads(alone.read_text())
            record = {
                "profile": found["profile"],
                "pairs": pairs,
                "predicted_at": now(),
                "predicted": predictions(timed_step_of(found["profile"]), pairs),
            }
            kept[recipe.stem] = record
            write(kept)
            record["measured_at"] = now()
            record["measured"] = {}
            for rate in RATES:
                for hosts in HOSTS:
                    name = place(hosts, rate)
                    record["measured"][name] = measured(alone, hosts, rate, record["predicted"][name])
        record["machine"] = spoken((load, os.getloadavg()[0]))
        write(kept)
        RESULT.write_text(render(kept))
        print(recipe.stem, flush=True)
    print(RESULT.read_text())


def place(hosts: int, rate: str) -> str:
    return f"{hosts} hosts, {rate}"


def now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S %z")


def write(kept: dict[str, Any]) -> None:
    KEPT.write_text(json.dumps({name: kept[name] for name in sorted(kept)}, indent=1) + "\n")


def predictions(model: TimedStep, pairs: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Seconds a step, by place and way."""
    return {
        place(hosts, rate): {
            way: predicted_s(model, cluster(way, hosts, pairs[rate][way]), way, hosts) for way in WIRES
        }
        for rate in RATES
        for hosts in HOSTS
    }


def predicted_s(model: TimedStep, rack: Cluster, way: str, hosts: int) -> float:
    job = Job(
        model.samples * hosts,
        model.samples,
        Split(data=hosts),
        precision="f32",
        overlap=True,
        in_network="in-network" in way,
        wire=WIRES[way],
    )
    return simulate(model, rack, job, Conditions(contention=False), CONSTANTS).prediction.step_s


def cluster(way: str, hosts: int, measured: Sequence[dict[str, float]]) -> Cluster:
    """The rack, with the link that two of its hosts showed by that way.

    Two ranks take two steps, in a ring and through the switch, and send as many bytes as the tensor has on the wire.
    """
    *two, four = measured
    call, *_, largest = two
    sent = [each["size_bytes"] / (2 if WIRES[way] == "bf16" else 1) for each in two]
    # The rate is the link's, which the quickest shows; a latency is the processors', as it mostly is.
    took = [call["seconds"], *(each["quickest_s"] for each in two[1:])]
    link = fit_link([(round(size / 2), seconds / 2) for size, seconds in zip(sent, took, strict=True)])
    # A ring of four takes six steps; the switch, as many as ever.
    message_s = 0.0 if "in-network" in way else max(0.0, four["core_s"] - call["core_s"]) / 4
    message_s = min(message_s, call["core_s"] / 2)
    of_rank, of_switch = (
        max(1e-12, (largest[whose] - call[whose]) / (sent[-1] - sent[0])) for whose in ("core_s", "switch_s")
    )
    return cluster_of(
        {
            # Its layers are timed, so nothing of a device is asked but that it passes buffers on at once: what that
            # takes is the cores'.
            "device": {
                "flops": {"f32": "1 TFLOP/s"}, "memory": "2 GB", "memory_rate": "10 GB/s", "copy_rate": "1000 TB/s"
            },
            "tier": [
                {
                    "name": "Ethernet",
                    "devices": hosts,
                    "latency": f"{link.latency_s:.9f} s",
                    "rate": f"{link.bytes_per_s:.0f} B/s",
                    "in_network": "in-network" in way,
                    "burst": f"{BURST_BYTES} B",
                }
            ],
            "shared": {
                "cores": os.cpu_count(),
                "operation": f"{call['core_s'] - 2 * message_s:.9f} s",
                "message": f"{message_s:.9f} s",
                "rate": f"{1 / of_rank:.0f} B/s",
                # Of two ranks' bytes.
                "switch_rate": f"{2 / of_switch:.0f} B/s",
            },
        },
        f"a rack of {hosts}",
    )  # fmt: skip


def between_two(rate: str) -> dict[str, list[dict[str, float]]]:
    """By way, calls of two ranks by size; and one, the last, of four."""
    found: dict[str, list[dict[str, float]]] = {}
    with Rack(2, rate) as rack:
        switch = rack.start_switch(lambda line: None)
        for ranks in (2, 4):
            with tempfile.TemporaryDirectory() as folder:
                run(rack, [str(HERE / "pair.py"), folder, str(switch.pid)], ranks)
                for way, calls in json.loads(Path(folder, "pair.json").read_text()).items():
                    found.setdefault(way, []).extend(calls)
    return found


def measured(alone: Path, hosts: int, rate: str, predicted: dict[str, float]) -> dict[str, list[float]]:
    """By way, the seconds of each step. Long steps are few, in one turn; short ones are many, in two."""
    steps = max(FEWEST, min(MOST, int(PLACE_S / sum(predicted.values()))))
    turns = 2 if steps == MOST else 1
    # DDP lays its buckets out when a second step begins, which is little of a long one.
    settling = 1 if steps == FEWEST else 2
    with tempfile.TemporaryDirectory() as folder, Rack(hosts, rate) as rack:
        rack.start_switch(lambda line: None)
        run(rack, [str(HERE / "closed_loop_rank.py"), str(alone), folder, str(turns), str(settling), str(steps)])
        found: dict[str, list[float]] = json.loads(Path(folder, "seconds.json").read_text())
        return found


def run(rack: Rack, argv: Sequence[str], ranks: int | None = None) -> None:
    """One a host of the rack, or so many spread over them, until all have ended."""
    count = ranks or rack.hosts
    processes = [
        rack.popen(
            rank * rack.hosts // count,
            [sys.executable, *argv],
            {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1", "RANK": str(rank), "WORLD_SIZE": str(count)},
        )
        for rank in range(count)
    ]
    readers = [follow(process, lambda line: print(line, file=sys.stderr, flush=True)) for process in processes]
    outcome = supervise(processes, DEADLINE_S)
    for reader in readers:
        reader.join(DRAIN_S)
    if outcome.exit_code:
        raise RuntimeError(f"rank {outcome.first_failed} failed with exit code {outcome.exit_code}; see above")


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


if __name__ == "__main__":
    with exit_on_signals():
        main(sys.argv[1:])
