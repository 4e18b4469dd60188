"""Train a toy job under torchrun. In each attempt except the last, one rank kills itself at a random moment.

killed_script.py FOLDER SEED KILLS STEPS
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from surviving import Recorder, run

from netfold_train.callbacks import events as said
from netfold_train.callbacks.metrics_file import MetricsFile
from netfold_train.runs.metrics import read_metrics

EVERY = 10


class Dying(Recorder):
    """Record where each attempt began, and end it."""

    def __init__(self, log: Path, dies_after_s: float | None) -> None:
        super().__init__()
        self._log, self._dies_after_s = log, dies_after_s

    def on_start(self, event: said.Started) -> None:
        self._write({"from": event.step})
        if self._dies_after_s is not None:
            threading.Thread(target=self._die, args=(self._dies_after_s,), daemon=True).start()

    def on_step(self, event: said.Stepped) -> None:
        self._write({"step": event.step})

    def seen(self, numbers: list[int]) -> None:
        time.sleep(0.002)
        self._write({"samples": numbers})

    def _write(self, line: dict[str, object]) -> None:
        with self._log.open("ab", buffering=0) as file:
            file.write(json.dumps(line).encode() + b"\n")

    def _die(self, after_s: float) -> None:
        time.sleep(after_s)
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    folder, (seed, kills, steps) = Path(sys.argv[1]), map(int, sys.argv[2:])
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    torch.set_num_threads(1)
    dist.init_process_group("netfold")
    rank = dist.get_rank()
    draw = random.Random(f"{seed} {attempt}")
    victim, after_s = draw.randrange(2), draw.uniform(0.0, 0.5)
    dying = Dying(folder / f"{attempt}-{rank}", after_s if attempt < kills and rank == victim else None)
    training, saving = {"steps": steps}, {"every": EVERY}
    (folder / "run").mkdir(exist_ok=True)
    others = [MetricsFile(folder / "run")] if rank == 0 else []
    ended = run(folder / "run", recorder=dying, forward=dying.seen, others=others, training=training, checkpoint=saving)
    alone = run(None, training=training)
    cost = read_metrics(folder / "run").cost_of_failures
    (folder / f"ended-{rank}").write_text(json.dumps([ended.metric, alone.metric, cost]))
    dist.destroy_process_group()


main()
