"""An elastic job of Ray's actors, as docs/how-to/elastic.md has it: ray_elastic.py FOLDER restart|anew.

One actor's process is killed. Ray restarts the actor, or the driver makes another one.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import ray
from launched_rank import SIZE, Watched

FOLDER, HOW = sys.argv[1:]


@ray.remote(num_cpus=0)
class Store:
    def __init__(self) -> None:
        command = [sys.executable, "-m", "netfold.cli", "store", "--listen", f"{ray.util.get_node_ip_address()}:0"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def endpoint(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().split()[-1]

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()


@ray.remote(num_cpus=0)
class Rank:
    def train(self) -> None:
        from launched_rank import trained

        trained(FOLDER)


def start(rank: int, endpoint: str) -> Any:
    variables = {"RANK": str(rank), "WORLD_SIZE": str(SIZE), "NETFOLD_STORE": endpoint}
    times = 3 if HOW == "restart" else 0
    made = Rank.options(max_restarts=times, max_task_retries=times, runtime_env={"env_vars": variables}).remote()
    return made.train.remote()


ray.init(num_cpus=SIZE, include_dashboard=False)
store = Store.remote()
endpoint = ray.get(store.endpoint.remote())
runs = [start(rank, endpoint) for rank in range(SIZE)]
watched = Watched(Path(FOLDER))
victim = watched.rank_to_kill(1)
os.kill(victim, signal.SIGKILL)
watched.has_killed()
if HOW == "anew":
    assert watched.needs_a_rank(), watched.read("place")
    runs[1] = start(1, endpoint)
watched.check(victim)
ray.get(runs)
ray.get(store.close.remote())
print(f"{HOW}: the new rank has joined")
