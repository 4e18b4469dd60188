"""The suite's two measurements that time no single call: CPU time used while waiting, and a DDP training step."""

import statistics

from netfold_lab.bench.backends import parse_backend
from netfold_lab.bench.config import BenchEnvironment, Measured
from netfold_lab.bench.rules import Verdict
from netfold_lab.bench.runner import Runner
from netfold_lab.bench.spread import paired_ratios, spread
from netfold_lab.bench.table import describe_ratio, describe_time

SLEEP_S = 2.0
# Six such layers are 25 M parameters, 96 MB of f32 gradients: four buckets of DDP's usual 25 MB.
DDP_WIDTH = 2048
# A waiting rank may spin for a moment; a tenth of a core is more than that.
WAITING_CPU_MOST_S = SLEEP_S / 10
_WAITING = ["netfold", "communicator", "gloo", "mpi:openmpi", "mpi:intel", "mpi:mpich"]
WAITING_PLACES = {BenchEnvironment(workers, switch=False): _WAITING for workers in (2, 4)}
DDP_PLACES = {BenchEnvironment(workers, switch=False): ["netfold", "gloo"] for workers in (2, 4)}


def waiting_verdicts(runner: Runner, backends: list[str], quick: bool) -> list[Verdict]:
    """Return a verdict for each backend: the ranks' CPU seconds in an all_reduce that one rank joins SLEEP_S late."""
    verdicts = []
    for backend in backends:
        answers = runner.measure_waiting(backend, size_bytes=4, sleep_s=SLEEP_S)
        waiting_s = [answer["cpu_s"] for answer in answers[:-1]]
        worst_s = max(waiting_s)
        has_goal = parse_backend(backend).is_netfold
        verdicts.append(
            Verdict(
                what=f"one rank {SLEEP_S:.0f} s late",
                size="4",
                ranks=str(runner.place.workers),
                ours=backend,
                our_time=f"CPU {statistics.median(waiting_s):.3f} s a waiting rank, at most {worst_s:.3f}",
                peer="-",
                peer_time="-",
                ratio="-",
                goal=f"<= {WAITING_CPU_MOST_S:.1f} s" if has_goal else "-",
                met=worst_s <= WAITING_CPU_MOST_S if has_goal else None,
            )
        )
    return verdicts


def ddp_verdicts(runner: Runner, backends: list[str], quick: bool) -> list[Verdict]:
    """Return a verdict on training steps of the first backend beside the second's, interleaved by round."""
    rounds, steps = (4, 2) if quick else (8, 3)
    ours, peer = runner.measure_ddp(backends, rounds=rounds, steps=steps, width=DDP_WIDTH)
    why = "; ".join(filter(None, (_differing(backends[0], ours), _differing(backends[1], peer))))
    return [
        Verdict(
            what="DDP step, 96 MB of gradients",
            size="96M",
            ranks=str(runner.place.workers),
            ours=backends[0],
            our_time=describe_time(spread(ours.times_ns)),
            peer=backends[1],
            peer_time=describe_time(spread(peer.times_ns)),
            ratio=describe_ratio(spread(paired_ratios(peer.times_ns, ours.times_ns))),
            goal="-",
            met=None,
            why=why,
        )
    ]


def _differing(backend: str, measured: Measured) -> str:
    return f"{backend}: {measured.wrong} layers differ between ranks" if measured.wrong else ""
