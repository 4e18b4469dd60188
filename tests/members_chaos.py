"""Members of an elastic job that are killed, stopped, continued and joined by newcomers at random moments.

A seed draws the faults, and whether the members share memory or know nothing of being on one host. Every step's sum is
checked. A failure says the seed, the faults, and what each process printed last.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from load import Deadline, seconds, settles
from members_job import Log, command

FIRST = 4
MOST = 8


@dataclass
class Process:
    number: int
    running: subprocess.Popen[bytes]
    log: Log
    continues_at: float = 0.0  # while it is stopped


class Chaos:
    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.drawn = folder, random.Random(seed)
        # Over TCP a majority must be left: the end of a process is certain only where ranks share memory.
        self.transport = ("auto", "tcp")[seed % 2]
        self.started = 0
        self.living: list[Process] = []
        self.done: list[str] = []

    def start(self) -> None:
        log = Log(self.folder / f"member{self.started}")
        with open(log.path, "wb") as out:
            environment = os.environ | {"NETFOLD_TRANSPORT": self.transport}
            member = command(self.folder, self.started, FIRST)
            running = subprocess.Popen(member, stdout=out, stderr=out, env=environment)
        self.living.append(Process(self.started, running, log))
        self.started += 1

    def fault(self) -> None:
        now = time.monotonic()
        for each in self.living:
            if each.continues_at and now > each.continues_at:
                self._signal(each, signal.SIGCONT, 0.0)
        going = [each for each in self.living if each.log.last() and not each.continues_at]
        kind = self.drawn.choice(("kill", "kill", "stop", "start"))
        if kind == "start" and len(self.living) < MOST:
            self.done.append("start")
            return self.start()
        # Two that hold the state go on.
        if len(going) < 3:
            return
        victim = self.drawn.choice(going)
        if kind == "kill" and not self._leaves_enough([each for each in going if each is not victim]):
            return
        if kind == "kill":
            self._signal(victim, signal.SIGKILL, 0.0)
            victim.running.wait()
            self.living.remove(victim)
        elif kind == "stop":
            self._signal(victim, signal.SIGSTOP, now + self.drawn.uniform(0.2, 6.0))

    def _leaves_enough(self, left: list[Process]) -> bool:
        """Whether those that are left can go on. Several kills may come before a busy machine's next generation."""
        if self.transport == "auto":
            return True
        generation, size, _ = max(each.log.last() for each in self.living if each.log.last())
        return 2 * sum(each.log.last()[0] == generation for each in left) > size

    def _signal(self, process: Process, number: signal.Signals, continues_at: float) -> None:
        self.done.append(f"{number.name} {process.number}")
        process.running.send_signal(number)
        process.continues_at = continues_at

    def is_settled(self) -> bool:
        last = [each.log.last() for each in self.living]
        return all(each and each[0] == last[0][0] and each[1] == len(self.living) for each in last)

    def output(self) -> str:
        return f"{', '.join(self.done)}\n{Log.text(each.log for each in self.living)}"


def run_chaos(folder: Path, seed: int, quiet_s: float) -> tuple[list[str], int, int]:
    """Faults for so long on a quiet machine. Returns them, and the last generation and step; AssertionError."""
    chaos = Chaos(folder, seed)
    try:
        for _ in range(FIRST):
            chaos.start()
        assert settles(chaos.is_settled, 60.0), chaos.output()
        left = Deadline(quiet_s)
        while left.left():
            time.sleep(chaos.drawn.uniform(0.0, 1.0))
            chaos.fault()
        for each in chaos.living:
            if each.continues_at:
                chaos._signal(each, signal.SIGCONT, 0.0)
        assert settles(chaos.is_settled, 60.0), f"seed {seed}: {chaos.output()}"
        generation = chaos.living[0].log.last()[0]
        (folder / "stop").touch()
        for each in chaos.living:
            assert each.running.wait(seconds(30)) == 0, f"seed {seed}: {chaos.output()}"
        ends = [each.log.last() for each in chaos.living]
        size, done = len(ends), ends[0][3]
        due = [["end", rank, size, done, done * (done + 1) / 2] for rank in range(size)]
        assert sorted(ends) == due, f"seed {seed}: {chaos.output()}"
        return chaos.done, generation, done
    finally:
        for each in chaos.living:
            each.running.kill()
            each.running.wait()
