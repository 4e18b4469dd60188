"""One rank of one world: `python -m netfold_lab.bench.rank WORLD FOLDER DEADLINE_S`.

WORLD: `torch`, `communicator`, or an MPI's name. The rank obeys one command at a time.
"""

import os
import statistics
import sys
import time
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from netfold_lab.bench.backends import Backend, BackendName, RefusedError, World, algorithm_of
from netfold_lab.bench.config import SMALL_BYTES, Message
from netfold_lab.bench.program import build_program
from netfold_lab.bench.ranks import connect
from netfold_lab.bench.replay import StepTrial
from netfold_lab.bench.start_line import StartLine
from netfold_lab.bench.trial import Trial
from netfold_lab.bench.turn import run_turn
from netfold_lab.rack.names import HOST_INTERFACE
from netfold_plan.model.catalogue import find_model
from netfold_train.runs.machine import congestion_control

if TYPE_CHECKING:
    from netfold_lab.bench.accuracy.rank import Accuracy

# Wire bytes are counted in rounds of their own, outside the timed ones: reading the counters takes longer than a small
# message, and the last acknowledgements need a moment to arrive. A veth counts a GSO packet's headers once, so the true
# bytes are up to 5% more, for TCP and UDP alike. In a rack with loss they are exact: packets are cut before the veth.
WIRE_ROUNDS = 3
WIRE_SETTLE_S = 0.05


def main(world_name: str, folder: str, deadline_s: str) -> None:
    with connect(folder, deadline_s) as orders:
        world = _make_world(world_name, folder)
        orders.begin(world.rank)
        ready = {"versions": world.versions, "congestion_control": congestion_control()}
        orders.serve(Rank(world, Path(folder)).obey, ready)
        world.close()


class Rank:
    """The commands, each a method `_NAME`. An answer is plain values; a refusal by a backend is an answer too."""

    def __init__(self, world: World, folder: Path) -> None:
        self._world = world
        self._backends: dict[str, Backend] = {}
        self._names: dict[str, BackendName] = {}
        self._trials: dict[str, Any] = {}
        self._accuracy_state: Accuracy | None = None
        self._line = cache(lambda ranks: StartLine(folder / f"{ranks}.line", world.rank, ranks))

    def obey(self, command: str, arguments: dict[str, Any]) -> Message:
        return cast(Message, getattr(self, f"_{command}")(**arguments))

    def _open(self, **fields: Any) -> Message:
        name = BackendName(**fields)
        try:
            self._backends[name.label] = self._world.backend(name)
        except RefusedError as refusal:
            return {"refused": str(refusal)}
        self._names[name.label] = name
        return {}

    def _prepare(self, label: str, **task: Any) -> Message:
        self._trials.pop(label, None)
        name, backend, size = self._names[label], self._backends[label], self._world.size
        try:
            trial = Trial(backend, self._line(size), self._world.rank, size, wire=_wire_of(name), **task)
            trial.run_once()
            ran = algorithm_of(backend.records())
            _refuse_other_algorithm(name, ran)
        except (RuntimeError, ValueError) as refusal:
            return {"refused": str(refusal)}
        self._trials[label] = trial
        return {"count": trial.count, "ran": ran, "tolerance": trial.tolerance}

    def _prepare_ddp(self, label: str, steps: int, width: int) -> Message:
        from netfold_lab.bench.ddp import DdpTrial

        group = cast(Any, self._backends[label]).group
        self._trials[label] = DdpTrial(group, self._line(self._world.size), self._world.rank, steps, width)
        return {}

    def _prepare_step(self, label: str, model: str, **scales: Any) -> Message:
        self._trials.pop(label, None)
        program = build_program(find_model(model), **scales)
        backend, rank, size = self._backends[label], self._world.rank, self._world.size
        try:
            trial = StepTrial(backend, self._line(size), rank, size, program, _wire_of(self._names[label]))
            trial.run_once()
        except (RuntimeError, ValueError) as refusal:
            return {"refused": str(refusal)}
        self._trials[label] = trial
        return {"alone_ns": trial.alone()}

    def _timer(self, label: str) -> Message:
        """Return how late the timer made each start, over all steps, warm-ups included."""
        return {"late_ns": self._trials[label].late_ns}

    def _burst(self, label: str, round_index: int, check: bool, breakdown: bool) -> Message:
        trial = self._trials[label]
        durations = trial.burst(round_index)
        answer: Message = {"mean_ns": sum(durations) // len(durations)}
        answer["wrong"] = trial.wrong_elements(round_index) if check else 0
        if breakdown:
            answer["call_ns"] = durations
            records = self._backends[label].records()
            answer["parts_ns"] = None if records is None else split_calls(records, durations)
        return answer

    def _wire(self, label: str, in_rack: bool) -> Message:
        """Return [sent, received] bytes of one call, or None: from the rack's interface, else from netfold's record."""
        if in_rack:
            return {"wire": self._count_interface(self._trials[label])}
        records = self._backends[label].records()
        if records is None or len(records) == 0:
            return {"wire": None}
        return {"wire": [int(records[-1]["wire_bytes"]), 0]}

    def _count_interface(self, trial: Trial) -> list[int]:
        """Return medians over WIRE_ROUNDS."""
        rounds = []
        for _ in range(WIRE_ROUNDS):
            trial.fill(0)
            trial.cross()
            time.sleep(WIRE_SETTLE_S)
            before = interface_bytes(HOST_INTERFACE)
            # No rank starts before all have read their counters.
            time.sleep(WIRE_SETTLE_S)
            calls = trial.call_all()
            time.sleep(WIRE_SETTLE_S)
            after = interface_bytes(HOST_INTERFACE)
            rounds.append([(b - a) // calls for a, b in zip(before, after, strict=True)])
        return [int(statistics.median(column)) for column in zip(*rounds, strict=True)]

    def _waiting(self, label: str, sleep_s: float) -> Message:
        """Return the CPU seconds that this rank used while the last rank slept `sleep_s` before it joined the call."""
        trial = self._trials[label]
        trial.fill(0)
        trial.cross()
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        if self._world.rank == self._world.size - 1:
            time.sleep(sleep_s)
        trial.call_all()
        return {"cpu_s": time.process_time() - cpu_s, "wall_s": time.perf_counter() - wall_s}

    def _choice(self, label: str, size_bytes: int) -> Message:
        """Return a communicator's algorithm for an all_reduce, and the part of it that goes through the switch."""
        group = cast(Any, self._backends[label]).communicator.group
        algorithm = group.table.choose("all_reduce", size_bytes).algorithm
        weights = group.shares.balanced
        part = 1 - weights[-1] / sum(weights) if algorithm == "split" else float(algorithm == "in_network")
        return {"algorithm": algorithm, "part": part}

    def _turn(self, label: str, **what: Any) -> Message:
        ranks = self._names[label].ranks
        return run_turn(self._backends[label], self._line(ranks), self._world.rank, ranks, **what)

    def _accuracy(self, what: str, **arguments: Any) -> Message:
        """Do a step of the accuracy benchmark, a method of Accuracy."""
        if self._accuracy_state is None:
            from netfold_lab.bench.accuracy.rank import Accuracy

            self._accuracy_state = Accuracy()
        return {"found": getattr(self._accuracy_state, what)(**arguments)}

    def _release(self, label: str) -> Message:
        self._trials.pop(label, None)
        return {}


def _wire_of(name: BackendName) -> str:
    """Return the wire format of a backend's f32: the one in its name, else the environment's. It is checked as such."""
    return name.wire or (os.environ.get("NETFOLD_WIRE_DTYPE", "") if name.is_netfold else "")


def _refuse_other_algorithm(name: BackendName, ran: tuple[str, str] | None) -> None:
    """Raise RefusedError where netfold did not take the algorithm or the wire format in the backend's name."""
    for asked, took in zip((name.algorithm, name.wire), ran or ("", ""), strict=True):
        if ran is not None and asked and took != asked:
            raise RefusedError(f"it ran by {ran[0]} in {ran[1]}, not by {asked}: netfold does not do this so")


def interface_bytes(interface: str) -> list[int]:
    folder = Path("/sys/class/net") / interface / "statistics"
    return [int((folder / name).read_text()) for name in ("tx_bytes", "rx_bytes")]


def split_calls(records: Any, durations_ns: list[int]) -> list[list[int]]:
    """Return [Python, queue, wire] nanoseconds of the latest calls, from the backend's own event records."""
    latest = records[-len(durations_ns) :]
    if len(latest) != len(durations_ns) or any(int(record["bytes"]) > SMALL_BYTES for record in latest):
        raise RuntimeError(
            f"the last {len(durations_ns)} calls were small, but netfold's latest event records say "
            f"{[int(record['bytes']) for record in latest]} bytes"
        )
    parts = []
    for duration_ns, record in zip(durations_ns, latest, strict=True):
        queue_ns = int(record["started_ns"]) - int(record["queued_ns"])
        wire_ns = int(record["finished_ns"]) - int(record["started_ns"])
        parts.append([duration_ns - queue_ns - wire_ns, queue_ns, wire_ns])
    return parts


def _make_world(name: str, folder: str) -> World:
    # Each module imports a package that the ranks of other worlds may lack, and torch takes long to import.
    if name == "torch":
        from netfold_lab.bench.backends.torch_backend import TorchWorld

        return TorchWorld()
    if name == "communicator":
        from netfold_lab.bench.backends.communicator_backend import CommunicatorWorld

        return CommunicatorWorld(folder)
    from netfold_lab.bench.backends.mpi_backend import MpiWorld

    return MpiWorld(name)


if __name__ == "__main__":
    main(*sys.argv[1:])
