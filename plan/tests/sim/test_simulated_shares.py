"""A job and a TCP flow on one queue, in virtual time: their shares, and the queue after the flow has ended."""

from itertools import pairwise

import pytest
from flows import SECOND_NS, Bbr, Bottleneck, Cubic

from netfold_plan.sim.harness import Operation
from netfold_plan.sim.network import LOST, SWITCH, Copy, Delivery
from netfold_plan.sim.simulation import Simulation

pytestmark = pytest.mark.native

INTERVAL_S = 4


class _OverError(Exception):
    pass


class Shared:
    """Two workers stream; from the first second on, a flow shares the queue of worker 0's link to the switch.

    packet_ns: of a link per packet. queue: packets that a link's queue holds; 64 ms by default.
    """

    def __init__(self, flow, seconds, packet_ns=400_000, queue=160):
        self.sender = Bottleneck(packet_ns, queue)
        self.links = {ends: Bottleneck(packet_ns, queue) for ends in ((1, SWITCH), (SWITCH, 0), (SWITCH, 1))}
        self.flow = flow(self.sender, SECOND_NS)
        self.totals = []  # packets of the job and of the flow, at the end of each interval
        self.results = 0
        self.end_ns = seconds * SECOND_NS
        self.simulation = Simulation(
            workers=2,
            window=192,
            payload_bytes=8,
            operations=[Operation(number, 4_000, "i32") for number in range(seconds * SECOND_NS // packet_ns // 1_250)],
            deliveries=self._fate,
            compare_machines=False,
            watch=self._watch,
        )

    def run(self):
        with pytest.raises(_OverError):
            self.simulation.run()
        return self

    def ratios(self):
        """Return the ratio of the flow's packets to the job's, by interval from the fourth second on."""
        pairs = pairwise(self.totals[1:])
        return [(flow - flow_before) / (job - job_before) for (job_before, flow_before), (job, flow) in pairs]

    def _fate(self, packet):
        now_ns = self.simulation.clock.now_ns
        self.flow.advance(now_ns)
        link = self.sender if packet.source == 0 else self.links[packet.source, packet.to]
        left_ns = link.enqueue(now_ns)
        return LOST if left_ns is None else Delivery((Copy(left_ns - now_ns),))

    def _watch(self, record):
        if record.when_ns >= len(self.totals) * INTERVAL_S * SECOND_NS:
            self.totals.append((self.results, self.flow.delivered))
        if record.when_ns > self.end_ns:
            raise _OverError
        if record.verdict is not None and record.verdict.outcome == "received" and record.event.to == 0:
            self.results += 1


@pytest.mark.parametrize("flow", [Cubic, Bbr])
@pytest.mark.parametrize("path", [{}, {"packet_ns": 100_000, "queue": 80}], ids=["64 ms", "8 ms"])
def test_a_job_and_a_tcp_flow_get_a_third_to_three_times_of_each_others_rate(flow, path):
    ratios = Shared(flow, 17, **path).run().ratios()
    assert len(ratios) == 3
    assert all(1 / 3 <= ratio <= 3 for ratio in ratios), ratios


def test_after_the_flow_has_ended_the_queue_is_short_again_and_the_link_busy():
    shared = Shared(lambda link, start_ns: Cubic(link, start_ns, end_ns=5 * SECOND_NS), 9).run()
    (before, _), (after, _) = shared.totals[1:3]
    assert after - before > 0.8 * INTERVAL_S * SECOND_NS / shared.sender.packet_ns
    for side in shared.simulation.harness.workers:
        assert side.machine.control == "delay"
        assert side.machine.smoothed_rtt_ns < 24_000_000, "the least window of 32 packets is 13 ms"
