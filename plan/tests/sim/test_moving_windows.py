"""Whole jobs whose congestion windows change: links with queues, losses and delays from seeds, and every sum checked.

The search has windows of a few chunks, which never change (`kLeastWindow`). Here W is 32 or more. The links of each
seed hold between a part of W and several times the target of a path's queue, so windows shrink by queues and by losses,
and grow again. netfold/sim/harness.py has the checks of every step.
"""

import ctypes
import itertools
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
from changed import build, change_file, load

from netfold._native import protocol
from netfold_plan.sim import harness
from netfold_plan.sim.harness import Operation
from netfold_plan.sim.network import LATENCY_NS, LOST, Copy, Delivery
from netfold_plan.sim.simulation import Simulation, SimulationError

pytestmark = pytest.mark.native

PROTOCOL = Path(__file__).parents[3] / "core" / "native" / "protocol"
INCLUDES = (PROTOCOL / "include", PROTOCOL.parent / "kernels" / "include")
OPTIONS = ("-O0", "-ffp-contract=off")
MS = 1_000_000
SEEDS = 12


class Campaign:
    """One seed's job: `run` checks its sums; `sizes` are the successive windows of its workers."""

    def __init__(self, seed):
        generator = self._generator = random.Random(seed)
        self.window = generator.choice([32, 48, 64, 96, 160])
        # W packets in a link's queue take 4 to 60 ms.
        self._packet_ns = int(generator.uniform(4, 60) * MS / self.window)
        self._loss = generator.choice([0.0, 0.0, 0.01, 0.1])
        self._delay = generator.choice([0.0, 0.02])
        self._free_ns = {}
        workers = generator.randint(2, 3)
        self.sizes = [[] for _ in range(workers)]
        self.simulation = Simulation(
            workers=workers,
            window=self.window,
            payload_bytes=8,
            operations=[Operation(0, 12 * self.window, "i32"), Operation(1, 8 * self.window, "i32")],
            deliveries=self._fate,
            latency_ns=generator.choice([1, 50]) * LATENCY_NS,
            compare_machines=False,
            watch=self._watch,
            replay=f"pytest core/tests/protocol/test_moving_windows.py -k 'seed_{seed}]'",
        )

    def _fate(self, packet):
        now_ns = self.simulation.clock.now_ns
        link = (packet.source, packet.to)
        waits_ns = max(0, self._free_ns.get(link, 0) - now_ns) + self._packet_ns
        self._free_ns[link] = now_ns + waits_ns
        if self._generator.random() < self._loss:
            return LOST
        extra_delay_ns = self._generator.randrange(5 * MS) if self._generator.random() < self._delay else 0
        return Delivery((Copy(waits_ns + extra_delay_ns),))

    def _watch(self, _):
        for side, sizes in zip(self.simulation.harness.workers, self.sizes, strict=True):
            size = side.machine.congestion_window
            if not sizes or sizes[-1] != size:
                sizes.append(size)

    def run(self):
        return self.simulation.run()

    def shrank(self):
        return any(after < before for sizes in self.sizes for before, after in itertools.pairwise(sizes))

    def grew(self):
        return any(after > before for sizes in self.sizes for before, after in itertools.pairwise(sizes))


@pytest.mark.parametrize("seed", range(SEEDS), ids="seed_{}".format)
def test_every_sum_is_right_while_windows_change(seed):
    Campaign(seed).run()


def test_windows_shrink_and_grow_in_the_seeds():
    campaigns = [Campaign(seed) for seed in range(4)]
    for campaign in campaigns:
        campaign.run()
    assert any(campaign.shrank() for campaign in campaigns)
    assert any(campaign.grew() for campaign in campaigns)


SET = "congestion_window_ = static_cast<std::uint32_t>(std::clamp<std::uint64_t>(wanted, least, config_.window));"
ROOM = "return flight_.count < congestion_window_;"
# Changes of worker.cpp, and the message of the failure.
MUTANTS = {
    "beyond-the-granted-window": (
        SET,
        "congestion_window_ = static_cast<std::uint32_t>(std::max<std::uint64_t>(wanted, least));",
        r"worker \d has a congestion window of \d+ within",
    ),
    "none": (
        SET,
        "congestion_window_ = static_cast<std::uint32_t>(wanted * least / 65536);",
        r"worker \d has a congestion window of 0 within",
    ),
    "window-ignored": (ROOM, "return true;", r"worker \d has \d+ chunks in flight, its congestion window is"),
    "one-more": (
        ROOM,
        "return flight_.count <= congestion_window_;",
        r"worker \d has \d+ chunks in flight, its congestion window is",
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_window_without_a_bound_is_caught(name, tmp_path, objects, monkeypatch):
    text, instead, message = MUTANTS[name]
    mutant = _mutant(text, instead, tmp_path, objects)
    monkeypatch.setattr(harness, "protocol", SimpleNamespace(**{**vars(protocol), "Worker": mutant}))
    with pytest.raises(SimulationError, match=message):
        for seed in range(SEEDS):
            Campaign(seed).run()


def test_a_worker_that_is_compiled_unchanged_does_what_production_does(tmp_path, objects, monkeypatch):
    production = Campaign(1)
    expected = production.run()
    monkeypatch.setattr(
        harness, "protocol", SimpleNamespace(**{**vars(protocol), "Worker": _mutant(ROOM, ROOM, tmp_path, objects)})
    )
    compiled = Campaign(1)
    assert str(compiled.run()) == str(expected)
    assert compiled.sizes == production.sizes


@pytest.fixture(scope="module")
def objects(tmp_path_factory):
    """Return the objects that a mutant is linked with."""
    folder = tmp_path_factory.mktemp("objects")
    sources = (PROTOCOL / "packet.cpp", Path(__file__).with_name("worker_abi.cpp"))
    built = [build(folder / f"{source.stem}.o", [source], INCLUDES, "-c", *OPTIONS) for source in sources]
    kernels = PROTOCOL.parents[1].glob("build/*/native/libnetfold_kernels.a")
    return [*built, max(kernels, key=lambda path: path.stat().st_mtime)]


def _mutant(text, instead, folder, objects):
    """Return a class like protocol.Worker, compiled from the changed source."""
    source = change_file(PROTOCOL / "worker.cpp", text, instead, folder)
    library = load(folder / "worker.so", [source, *objects], INCLUDES, *OPTIONS)
    library.worker_new.restype = ctypes.c_void_p
    for number in ("next_send_ns", "poll_timeout", "oldest_outstanding", "retransmissions"):
        getattr(library, f"worker_{number}").restype = ctypes.c_int64

    class Worker:
        def __init__(self, *, job, epoch, incarnation, worker, workers, window, payload_bytes):
            shape = (job, epoch, incarnation, worker, workers, window, payload_bytes)
            self._self = ctypes.c_void_p(library.worker_new(*map(ctypes.c_uint32, shape)))
            self._bytes = protocol.HEADER_BYTES + payload_bytes

        def __del__(self):
            library.worker_delete(self._self)

        def __getattr__(self, name):
            return getattr(library, f"worker_{name}")(self._self)

        def can_start(self):
            return bool(library.worker_can_start(self._self))

        def start(self, operation, elements, wire, reduce, table):
            library.worker_start(self._self, operation, ctypes.c_uint64(elements), wire, reduce, table)

        def poll_send(self, now_ns):
            header, first, count = (ctypes.c_char * protocol.HEADER_BYTES)(), ctypes.c_uint64(), ctypes.c_uint16()
            sent = library.worker_poll_send(
                self._self, ctypes.c_int64(now_ns), header, ctypes.byref(first), ctypes.byref(count)
            )
            if not sent:
                return None
            parsed = protocol.Header.parse(header.raw)
            return SimpleNamespace(header=parsed, first=first.value, count=count.value, again=sent == 2)

        def not_sent(self, chunk):
            library.worker_not_sent(self._self, ctypes.c_uint64(chunk))

        def handle_packet(self, data, now_ns):
            drop, first, values = ctypes.c_int(), ctypes.c_uint64(), (ctypes.c_char * self._bytes)()
            finished, size = ctypes.c_int(), ctypes.c_uint64()
            outcome = library.worker_handle_packet(
                self._self,
                data,
                ctypes.c_uint64(len(data)),
                ctypes.c_int64(now_ns),
                *map(ctypes.byref, (drop, first, finished, size)),
                values,
            )
            kind = ("dropped", "received", "mismatch", "nack")[outcome]
            header = protocol.Header.parse(data)
            got = values.raw[: size.value]
            return kind, protocol.DROPS[drop.value], header, first.value, bool(finished.value), got

        def next_send_ns(self):
            return library.worker_next_send_ns(self._self)

        def poll_timeout(self):
            return library.worker_poll_timeout(self._self)

        def handle_timeout(self, now_ns):
            library.worker_handle_timeout(self._self, ctypes.c_int64(now_ns))

        def sendable(self):
            return library.worker_sendable(self._self)

        def copy(self):
            return self

        def __eq__(self, other):
            return self is other

        def __hash__(self):
            return id(self)

        def canonical(self):
            return b""

    return Worker
