"""Whole jobs over an arbitrary network: every sum is right, every job ends, and invalid packets change nothing.

netfold/sim/harness.py has the checks of every step. Examples shrink to "packet 17 is lost"; seeded runs print their
replay command.
"""

import random
import re
from collections import Counter
from statistics import mean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from netfold._native import protocol
from netfold_plan.sim import values
from netfold_plan.sim.harness import Identity, Operation
from netfold_plan.sim.network import (
    DELIVERED,
    GUARDED_BITS,
    LATENCY_NS,
    LOST,
    REFUSED,
    SWITCH,
    Copy,
    Delivery,
    ListedDeliveries,
    Packet,
)
from netfold_plan.sim.scenario import Scenario
from netfold_plan.sim.simulation import Simulation, Timer

pytestmark = pytest.mark.native

MS = 1_000_000

# Strategies: small first, so that failures shrink to few workers, small windows and plain deliveries.

# From "overtaken by the next packet" over many rounds of the window to later than several timeouts.
extra_delays = st.sampled_from(
    [LATENCY_NS * half_latencies // 2 for half_latencies in (0, 1, 3, 5, 8, 13, 21, 34, 60, 100)] + [30 * MS]
)
copies = st.one_of(
    st.builds(Copy, extra_delays),
    st.builds(Copy, extra_delays),
    st.builds(Copy, extra_delays),
    st.builds(Copy, extra_delays, cut_to_bytes=st.integers(0, 111)),
    st.builds(Copy, extra_delays, flipped_bit=st.sampled_from(GUARDED_BITS)),
)
deliveries = st.one_of(
    st.just(DELIVERED),
    st.just(LOST),
    st.just(REFUSED),
    st.builds(Delivery, st.tuples(copies)),
    st.builds(Delivery, st.tuples(copies, copies)),
    st.builds(Delivery, st.tuples(copies, copies, copies)),
)
# Copies and delays alone: without a stall between the rounds, late duplicates meet a slot that collects.
reorderings = st.one_of(
    st.just(DELIVERED),
    st.builds(lambda *delays: Delivery(tuple(map(Copy, delays))), extra_delays, extra_delays),
    st.just(DELIVERED),
)


def schedules(fate, longest=150):
    """Draw the fates of the first packets, few or many; all later packets are delivered."""
    return st.sampled_from([0, 5, 30, longest]).flatmap(lambda count: st.lists(fate, min_size=count, max_size=count))


@st.composite
def operation_lists(draw, payload_bytes, largest=40, most=5):
    operations = []
    for number in range(draw(st.integers(1, most))):
        wire = draw(st.sampled_from(list(values.WIRES)))
        reduce = draw(st.sampled_from([name for name in values.REDUCES if values.is_defined(name, wire)]))
        full = payload_bytes // values.WIRES[wire].element_bytes
        elements = draw(st.one_of(st.sampled_from([1, full, full + 1, 3 * full]), st.integers(1, largest)))
        operations.append(Operation(number, elements, wire, reduce, table=draw(st.sampled_from([0, 0xBEEF]))))
    return operations


@st.composite
def jobs(draw, **lengths):
    payload_bytes = 8 * draw(st.integers(1, 8))
    return {
        "workers": draw(st.integers(1, 5)),
        "window": draw(st.integers(1, 6)),
        "payload_bytes": payload_bytes,
        "operations": draw(operation_lists(payload_bytes, **lengths)),
    }


@given(jobs(), schedules(deliveries))
def test_the_sum_is_right_whatever_happens_to_packets(job, schedule):
    Simulation(**job, deliveries=ListedDeliveries(schedule)).run()


@given(jobs(), schedules(reorderings))
def test_the_sum_is_right_when_duplicates_come_rounds_later(job, schedule):
    Simulation(**job, deliveries=ListedDeliveries(schedule)).run()


@given(jobs(), schedules(deliveries), st.data())
def test_workers_may_start_at_different_times(job, schedule, data):
    gap_ns = st.sampled_from([0, LATENCY_NS, 7 * LATENCY_NS, 12 * MS, 300 * MS])
    calls_ns = []
    for _ in range(job["workers"]):
        now_ns, calls = 0, []
        for _ in job["operations"]:
            now_ns += data.draw(gap_ns)
            calls.append(now_ns)
        calls_ns.append(calls)
    Simulation(**job, deliveries=ListedDeliveries(schedule), calls_ns=calls_ns).run()


@given(jobs(most=24, largest=4), schedules(deliveries))
def test_many_short_operations_stream_through_one_window(job, schedule):
    # More than MAX_OPERATIONS: the others wait outside the machine.
    Simulation(**job, deliveries=ListedDeliveries(schedule)).run()


@given(jobs(), schedules(deliveries), st.data())
def test_blocks_that_one_worker_gives_and_the_others_leave_zero_reach_all_unchanged(job, schedule, data):
    # The protocol's form of a broadcast and an all_gather: zeros outside the own block, and a bitwise or of all.
    unsigned = st.sampled_from(["u8", "u16", "u32", "u64"])
    operations = [Operation(each.number, each.elements, data.draw(unsigned), "bor") for each in job["operations"]]
    moved, owners = [], []
    for each in operations:
        bits = random.Random(each.number).randbytes(each.elements * values.WIRES[each.wire].element_bytes)
        moved.append(np.frombuffer(bits, values.WIRES[each.wire].storage))
        ends = sorted(data.draw(st.integers(0, each.elements)) for _ in range(job["workers"] - 1))
        owners.append(np.searchsorted(ends, np.arange(each.elements), side="right"))

    def contributions(operation, worker):
        return np.where(owners[operation.number] == worker, moved[operation.number], 0).astype(
            moved[operation.number].dtype
        )

    simulation = Simulation(
        **{**job, "operations": operations}, deliveries=ListedDeliveries(schedule), contributions=contributions
    )
    simulation.run()
    for side in simulation.harness.workers:
        assert [bytes(buffer) for buffer in side.buffers] == [each.tobytes() for each in moved]


@given(jobs(most=2), schedules(deliveries, longest=60), st.data())
def test_packets_of_another_generation_change_nothing(job, schedule, data):
    identity = data.draw(
        st.sampled_from([Identity(epoch=2), Identity(epoch=4), Identity(job=8), Identity(incarnation=1)])
    )
    foreign = []

    def record(packet):
        foreign.append(Packet(packet.source, packet.to, packet.data, must_drop=True))
        return DELIVERED

    Simulation(**job, deliveries=record, identity=identity).run()
    # As early and as late as packets of this generation come.
    shift_ns = data.draw(st.sampled_from([0, 3 * LATENCY_NS, 10 * MS]))
    injected = [(shift_ns + place * LATENCY_NS // 4, packet) for place, packet in enumerate(foreign)]
    summary = Simulation(**job, deliveries=ListedDeliveries(schedule), injected=injected).run()
    reason = {2: "epoch", 4: "epoch"}.get(identity.epoch) or ("foreign" if identity.job == 8 else "incarnation")
    assert summary.drops[f"switch.{reason}"] + summary.drops[f"worker.{reason}"] >= len(foreign)


@given(jobs(most=2), st.lists(st.tuples(st.integers(0, 300_000), st.integers(-1, 4), st.binary(max_size=120))))
def test_garbage_changes_nothing(job, garbage):
    injected = [
        (when_ns, Packet(0 if to == SWITCH else SWITCH, to % job["workers"] if to >= 0 else SWITCH, data, True))
        for when_ns, to, data in garbage
    ]
    Simulation(**job, deliveries=ListedDeliveries([]), injected=injected).run()


@given(jobs(most=2), schedules(deliveries, longest=60), st.data())
def test_packets_sent_the_wrong_way_change_nothing(job, schedule, data):
    # Every contribution is reflected to its worker, every answer to the switch, as by a broken router.
    reflected = []

    def record(packet):
        to = packet.source if packet.to == SWITCH else SWITCH
        reflected.append(Packet(packet.to, to, packet.data, must_drop=True))
        return DELIVERED

    Simulation(**job, deliveries=record).run()
    injected = [(place * data.draw(st.integers(0, LATENCY_NS)), packet) for place, packet in enumerate(reflected[:20])]
    Simulation(**job, deliveries=ListedDeliveries(schedule), injected=injected).run()


def test_a_flip_of_any_guarded_bit_is_a_loss():
    job = {"workers": 2, "window": 2, "payload_bytes": 8, "operations": [Operation(0, 9, "i32")]}
    for bit in GUARDED_BITS:
        damaged = Delivery((Copy(flipped_bit=bit),))
        # The first contribution, and the first answer.
        schedule = [damaged, DELIVERED, DELIVERED, DELIVERED, damaged]
        summary = Simulation(**job, deliveries=ListedDeliveries(schedule)).run()
        assert sum(summary.drops.values()) >= 2, bit
        assert summary.retransmissions >= 2, bit


def test_a_clean_network_sees_each_packet_once():
    for window in (1, 2, 5, 64):
        job = {"workers": 3, "window": window, "payload_bytes": 16}
        operations = [Operation(number, 37 + number, "f32") for number in range(4)]
        summary = Simulation(**job, operations=operations, deliveries=ListedDeliveries([])).run()
        chunks = sum(-(-operation.elements // 4) for operation in operations)
        assert summary.packets == {"sent": 2 * 3 * chunks}
        assert (summary.timeouts, summary.retransmissions, summary.drops) == (0, 0, {})


def test_one_loss_in_a_long_stream_is_repaired_from_the_gap_without_a_timeout():
    for lost in (0, 5, 100):
        operations = [Operation(0, 2000, "i32")]
        schedule = [LOST if place == lost else DELIVERED for place in range(lost + 1)]
        job = {"workers": 2, "window": 32, "payload_bytes": 8, "operations": operations}
        summary = Simulation(**job, deliveries=ListedDeliveries(schedule)).run()
        assert summary.timeouts == 0
        assert 1 <= summary.retransmissions <= 2, "a lost contribution looks like a loss to both workers"


class Links:
    """A link to each worker and one from it, each with a queue. loses: a predicate of the lost packets."""

    PACKET_NS = 200_000
    CHUNKS = 3000

    def __init__(self, loses):
        self._loses = loses
        self._free_ns = {}
        self.simulation = Simulation(
            workers=4,
            window=192,
            payload_bytes=8,
            operations=[Operation(0, 2 * self.CHUNKS, "i32")],
            deliveries=self._fate,
            compare_machines=False,
            watch=self._watch,
        )

    def _watch(self, record):
        # A timer that was set before the end expires after it.
        if record.verdict is not None and record.verdict.outcome == "received":
            self.finished_ns = record.when_ns

    def _fate(self, packet):
        now_ns = self.simulation.clock.now_ns
        link = (packet.source, packet.to)
        waits_ns = max(0, self._free_ns.get(link, 0) - now_ns) + self.PACKET_NS
        self._free_ns[link] = now_ns + waits_ns
        # Lost behind the queue, as on a bad cable: a lost packet uses the link too.
        return LOST if self._loses(packet) else Delivery((Copy(waits_ns),))


def first_tries(count, to, source, chunks):
    """Return a predicate that loses the first `count` packets of each of these chunks from `source` to `to`."""
    left = dict.fromkeys(chunks, count)

    def loses(packet):
        chunk = protocol.Header.parse(packet.data).chunk
        if (packet.to, packet.source) != (to, source) or left.get(chunk, 0) == 0:
            return False
        left[chunk] -= 1
        return True

    return loses


# Of LOSS_SEEDS runs: the loss ratio in each direction; the most average time, as a ratio; the most retransmissions per
# lost packet.
LOSSES = [(0.001, 1.03, 1.2), (0.01, 1.1, 1.4), (0.05, 1.5, 1.5), (0.2, 4, 2)]
LOSS_SEEDS = 5


def run_links(loses):
    """Return the summary and the time of the last answer."""
    links = Links(loses)
    return links.simulation.run(), links.finished_ns


CLEAN_NS = run_links(lambda _: False)[1]


def test_a_queue_is_kept_short_and_the_link_busy():
    links = Links(lambda _: False)
    summary = links.simulation.run()
    assert links.finished_ns < 1.03 * Links.CHUNKS * Links.PACKET_NS
    for side in links.simulation.harness.workers:
        # 32 packets, the least window outside a trial, take 6.4 ms here, longer than the target: so there are trials.
        assert 16 <= side.machine.congestion_window < 48
        assert side.machine.smoothed_rtt_ns < 9 * MS, "192 packets would take 38 ms"
    assert summary.retransmissions == 0


def test_a_contribution_that_is_lost_twice_is_found_twice_without_a_timeout():
    summary, finished_ns = run_links(first_tries(2, SWITCH, 1, [500]))
    assert (summary.packets["lost"], summary.timeouts) == (2, 0)
    assert summary.retransmissions <= 2 + 3, "the other three workers wait, and send again once at most"
    assert finished_ns <= CLEAN_NS + 3 * Links.PACKET_NS


def test_only_the_worker_that_lost_an_answer_sends_again():
    summary, finished_ns = run_links(first_tries(1, 2, SWITCH, [500]))
    assert (summary.packets["lost"], summary.timeouts, summary.retransmissions) == (1, 0, 1)
    assert finished_ns <= CLEAN_NS + 3 * Links.PACKET_NS


@pytest.mark.parametrize("burst", [5, 15, 40])
@pytest.mark.parametrize("direction", [(SWITCH, 1), (1, SWITCH)], ids=["to_the_switch", "from_the_switch"])
def test_a_burst_of_losses_amid_a_stream_is_repaired_packet_by_packet(burst, direction):
    summary, _ = run_links(first_tries(1, *direction, range(500, 500 + burst)))
    assert summary.packets["lost"] >= burst
    # A burst as long as the window leaves no later packet that reveals it: one probe per worker does.
    assert summary.timeouts <= (0 if burst < 10 else 16)
    # The other workers send a chunk again once where its repair takes long.
    assert summary.retransmissions <= 4 * summary.packets["lost"] + summary.timeouts


@pytest.mark.parametrize(("loss", "longer", "again"), LOSSES)
def test_losses_both_ways_cost_little_more_than_their_packets(loss, longer, again):
    finished_ns, lost, retransmissions = [], 0, 0
    for seed in range(LOSS_SEEDS):
        generator = random.Random(seed)
        summary, end_ns = run_links(lambda _, generator=generator: generator.random() < loss)
        finished_ns.append(end_ns)
        lost += summary.packets["lost"]
        retransmissions += summary.retransmissions
    assert retransmissions <= again * lost + 8 * LOSS_SEEDS
    assert mean(finished_ns) <= longer * CLEAN_NS + 20 * MS, "with a tail that the timer repairs"


def test_a_worker_has_one_timer_however_often_it_is_set_again():
    generator, counts = random.Random(1), Counter()
    links = Links(lambda _: generator.random() < 0.2)
    watch = links.simulation._watch

    def count(record):
        counts[type(record.event)] += 1
        watch(record)

    links.simulation._watch = count
    links.simulation.run()
    assert counts[Timer] < counts[Packet] / 20, "a replaced timer that expires sets no other"


def test_a_straggler_costs_each_other_worker_a_probe_a_timeout_and_at_most_one_window():
    extra_delay_ns = 3_000 * MS
    job = {"workers": 4, "window": 64, "payload_bytes": 8, "operations": [Operation(0, 1000, "i32")]}
    calls_ns = [[extra_delay_ns], [0], [0], [0]]
    summary = Simulation(**job, deliveries=ListedDeliveries([]), calls_ns=calls_ns).run()
    # 50, 100, then every 200 ms: at most 17 timeouts each in three seconds, of one packet. After the straggler comes,
    # the probe's answer does not show whether the other chunks were lost or late: they are sent again once.
    assert summary.timeouts <= 3 * 17
    assert summary.retransmissions <= summary.timeouts + 3 * job["window"]


def test_without_a_switch_the_machine_sends_probes_for_ever_at_a_falling_rate():
    job = {"workers": 2, "window": 32, "payload_bytes": 8, "operations": [Operation(0, 1000, "i32")]}
    simulation = Simulation(**job, deliveries=lambda packet: LOST, max_events=300, replay="THE COMMAND")
    with pytest.raises(AssertionError, match="did not end within 300 events") as failure:
        simulation.run()
    assert "replay: THE COMMAND" in str(failure.value)
    per_second = simulation.network.counts["sent"] / (simulation.clock.now_ns / 1e9)
    assert per_second < 2 * 8 * 6


NETWORKS = {
    "fair": {"loss": 0.01, "delay": 0.02},
    "lossy": {"loss": 0.2},
    "duplicates": {"loss": 0.0, "duplicate": 0.5, "delay": 0.5, "refuse": 0.0},
    "duplicates_at_one_slot": {
        "workers": 2,
        "window": 1,
        "payload_bytes": 8,
        "loss": 0.0,
        "duplicate": 0.4,
        "delay": 0.4,
    },
    "very_late": {"delay": 0.3, "duplicate": 0.3, "extra_delay_us": 60_000},
    "damaged": {"truncate": 0.1, "corrupt": 0.2, "refuse": 0.1},
    "wide_window": {"window": 64, "loss": 0.05, "max_elements": 2000, "operations": 4},
    "stragglers": {"straggle_ms": 40.0, "operations": 20, "workers": 5},
    "all_at_once": {"loss": 0.1, "duplicate": 0.2, "delay": 0.3, "truncate": 0.05, "corrupt": 0.05, "refuse": 0.1},
}


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("network", NETWORKS)
def test_seeded_networks(network, seed):
    summary = Scenario(seed=seed, **NETWORKS[network]).simulation().run()
    assert re.match(r"ok  events=\d+", str(summary))
