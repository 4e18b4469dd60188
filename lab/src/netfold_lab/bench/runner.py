"""The runner: gives every backend its turn, round by round, and collects their times.

Backends A, B, C run A B C, B C A, C A B, ... (spread.interleave). While one has its turn, the ranks of the other worlds
sleep in a read.
"""

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from typing import Any

from netfold.extras import need
from netfold_lab.bench.backends import BackendName, parse_backend, parse_backends
from netfold_lab.bench.config import (
    SMALL_BYTES,
    BenchEnvironment,
    Measured,
    Message,
    Replay,
    Replayed,
    SizeResult,
    Trials,
    calls_a_round,
)
from netfold_lab.bench.network import Network, Place, open_network
from netfold_lab.bench.ranks import BenchError, Ranks, start_ranks
from netfold_lab.bench.spread import interleave
from netfold_lab.rack import Rack
from netfold_train.runs.machine import describe_machine, describe_versions

__all__ = ["BenchError", "Runner", "measure", "start_runner"]


def measure(place: BenchEnvironment, *trials: Trials) -> tuple[list[list[SizeResult]], dict[str, Any]]:
    """Run benchmarks of the same backends, one after the other; return their results, and `Runner.describe()`.

    Raises BenchError, ValueError, RackError.
    """
    with start_comparison(place, trials[0].backends) as runner:
        return [runner.measure(each) for each in trials], runner.describe()


def start_comparison(place: BenchEnvironment, backends: Sequence[str]) -> AbstractContextManager["Runner"]:
    """Start a runner for these backends; without netfold among them, no aggregator."""
    names = parse_backends(backends)
    if not any(name.is_netfold for name in names):
        place = replace(place, switch=False)
    return start_runner(place, [name.world for name in names])


@contextlib.contextmanager
def start_runner(place: BenchEnvironment, worlds: Sequence[str], rack: Rack | None = None) -> Iterator["Runner"]:
    """Start the ranks of all worlds, for any number of trials. No rank is left when the block is done.

    rack: one that stands, with its aggregators; None: `place` says which one to build, if any.
    Raises BenchError; ValueError (PeerMissingError, MissingExtraError) where a world cannot be had; RackError where the
    rack or the switch cannot be started.
    """
    if "torch" in worlds:
        need("a backend of torch", ["torch"], "torch")
    load = os.getloadavg()[0]
    rate = place.rack_rate or ""
    switch = True if rate and place.switch is None else place.switch
    where = Place(place.workers, rate, loss=place.rack_loss, delay=place.rack_delay, switch=switch)
    with contextlib.ExitStack() as stack:
        network = Network(where, rack) if rack is not None else stack.enter_context(open_network(where))
        ranks = {}
        for world in dict.fromkeys(worlds):
            argv = [sys.executable, "-m", "netfold_lab.bench.rank", world]
            ranks[world] = stack.enter_context(start_ranks(network, world, argv, deadline_s=place.deadline_s))
        yield Runner(place, ranks, load)


class Runner:
    """Measures on ranks that were started once.

    ranks: by world. One world has the turn; the other ranks sleep in a read meanwhile.
    versions, congestion_control: as the ranks reported them.
    """

    def __init__(self, place: BenchEnvironment, ranks: Mapping[str, Ranks], load_before: float) -> None:
        self.place = place
        ready: list[Message] = [each.ready[0] for each in ranks.values()]
        self.versions: dict[str, str] = {name: of for each in ready for name, of in each["versions"].items()}
        self.congestion_control: str = ready[0]["congestion_control"]
        self._ranks = ranks
        self._load_before = load_before
        self._refusals: dict[str, str | None] = {}  # by the label of a backend that was opened; None: it works

    def describe(self) -> dict[str, Any]:
        """Return the record of a result, for JSON: machine and load (1 minute), versions with the commit, launches."""
        load = (self._load_before, os.getloadavg()[0])
        control = {"tcp_congestion_control": self.congestion_control}
        return {
            "machine": {**describe_machine(), **control, "load": load},
            "versions": describe_versions(self.versions),
            "launches": 1,
            "place": asdict(self.place),
        }

    def tell(self, world: str, command: str, first: int | None = None, /, **arguments: Any) -> list[Message]:
        """Send one command to a world's `first` ranks (None: all); return their answers in the order of ranks."""
        return self._ranks[world].ask(command, arguments, first=first)

    def measure(self, trials: Trials) -> list[SizeResult]:
        """Measure every size on every backend, interleaved round by round."""
        return [self._measure_size(trials, size_bytes) for size_bytes in trials.sizes]

    def measure_ddp(self, backends: Sequence[str], rounds: int, steps: int, width: int) -> list[Measured]:
        """Measure training steps of a small model, with layers of this width, on each torch backend."""
        names = parse_backends(backends)
        measured = {}
        for name in names:
            answers = self._prepare(name, "prepare_ddp", steps=steps, width=width)
            measured[name.label] = _new_measured(answers, check=True)
        self._play(names, measured, rounds, warmups=1)
        self._release(names)
        return list(measured.values())

    def measure_step(self, replay: Replay, model: str) -> list[Replayed]:
        """Measure training steps of one model; one entry for each backend."""
        names = parse_backends(replay.backends)
        measured = {}
        alone_ns: dict[str, int] = {}
        for name in names:
            answers = self._prepare(name, "prepare_step", model=model, **replay.scales())
            one = measured[name.label] = _new_measured(answers, replay.check)
            if one.refused is None:
                alone_ns[name.label] = max(answer["alone_ns"] for answer in answers)
        playing = [name for name in names if name.label in alone_ns]
        self._play(playing, measured, replay.rounds, replay.warmups)
        late_ns = {
            name.label: [late for answer in self._tell(name, "timer") for late in answer["late_ns"]] for name in playing
        }
        self._release(playing)
        return [Replayed(one, alone_ns.get(label), late_ns.get(label, [])) for label, one in measured.items()]

    def measure_waiting(self, backend: str, size_bytes: int, sleep_s: float) -> list[Message]:
        """Return each rank's CPU and wall seconds in an all_reduce that the last rank joins `sleep_s` late."""
        name = parse_backend(backend)
        self._prepare_call(name, Trials("all_reduce", [backend], [size_bytes]), size_bytes, calls=1)
        answers = self._tell(name, "waiting", sleep_s=sleep_s)
        self._release([name])
        return answers

    def choice(self, backend: str, size_bytes: int) -> tuple[str, float]:
        """Return the algorithm of a measured communicator's all_reduce, and the part that goes through the switch."""
        answer = self._tell(parse_backend(backend), "choice", size_bytes=size_bytes)[0]
        return answer["algorithm"], answer["part"]

    def _measure_size(self, trials: Trials, size_bytes: int) -> SizeResult:
        names = parse_backends(trials.backends)
        measured = {}
        count = 0
        for name in names:
            answers = self._prepare_call(name, trials, size_bytes, calls_a_round(size_bytes))
            one = measured[name.label] = _new_measured(answers, trials.check)
            one.algorithm, one.wire = next((a["ran"] for a in answers if a.get("ran")), (None, None))
            one.tolerance = max(a.get("tolerance", 0.0) for a in answers)
            count = max(count, answers[0].get("count", 0))
        playing = [name for name in names if measured[name.label].refused is None]
        breakdown = trials.breakdown and size_bytes <= SMALL_BYTES
        self._play(playing, measured, trials.rounds, trials.warmups, breakdown=breakdown)
        for name in playing:
            by_rank = [a["wire"] for a in self._tell(name, "wire", in_rack=self.place.rack_rate is not None)]
            measured[name.label].wire_bytes = None if None in by_rank else by_rank
        self._release(playing)
        return SizeResult(size_bytes, count, list(measured.values()))

    def _prepare_call(self, name: BackendName, trials: Trials, size_bytes: int, calls: int) -> list[Message]:
        task = {"collective": trials.collective, "size_bytes": size_bytes, "dtype": trials.dtype, "calls": calls}
        return self._prepare(name, "prepare", **task, redop=trials.redop)

    def _prepare(self, name: BackendName, command: str, **arguments: Any) -> list[Message]:
        """Return the ranks' answers, of which each may be a refusal; one refusal where the backend cannot be opened."""
        if name.label not in self._refusals:
            answers = self.tell(name.world, "open", **asdict(name))
            self._refusals[name.label] = refusal_of(answers)
        refusal = self._refusals[name.label]
        return self._tell(name, command, **arguments) if refusal is None else [{"refused": refusal}]

    def _play(
        self,
        names: Sequence[BackendName],
        measured: dict[str, Measured],
        rounds: int,
        warmups: int,
        *,
        breakdown: bool = False,
    ) -> None:
        """Play all rounds of backends that have been prepared; `measured` by label."""
        for number, name in interleave(names, range(-warmups, rounds)):
            one = measured[name.label]
            check = one.wrong is not None
            answers = self._tell(name, "burst", round_index=number + warmups, check=check, breakdown=breakdown)
            if one.wrong is not None:
                one.wrong += sum(answer["wrong"] for answer in answers)
            if number >= 0:
                one.times_ns.append(max(answer["mean_ns"] for answer in answers))
                for answer in answers:
                    one.call_ns += answer.get("call_ns") or []
                    one.parts_ns += answer.get("parts_ns") or []

    def _release(self, names: Sequence[BackendName]) -> None:
        for name in names:
            self._tell(name, "release")

    def _tell(self, name: BackendName, command: str, **arguments: Any) -> list[Message]:
        return self.tell(name.world, command, label=name.label, **arguments)


def refusal_of(answers: Sequence[Message]) -> str | None:
    return next((answer["refused"] for answer in answers if "refused" in answer), None)


def _new_measured(answers: Sequence[Message], check: bool) -> Measured:
    refusal = refusal_of(answers)
    return Measured(refused=refusal, wrong=0 if check and refusal is None else None)
