"""One run: a harness, a network and a clock, until no event is due."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from netfold_plan.sim.clock import Clock
from netfold_plan.sim.harness import Harness, InvariantError, Operation, Verdict, describe
from netfold_plan.sim.network import LATENCY_NS, DeliverySource, Network, Packet
from netfold_plan.sim.tree import TreeHarness

# After this time a full socket takes packets again.
_WRITABLE_AFTER_NS = 2_000
# The text of a failure shows this many events.
_REMEMBERED_EVENTS = 24


class SimulationError(AssertionError):
    """A promise is broken, or a run did not end within its bound."""


@dataclass(frozen=True, slots=True)
class Call:
    """A worker's training script calls its next operation."""

    worker: int


@dataclass(frozen=True, slots=True)
class Timer:
    worker: int


@dataclass(frozen=True, slots=True)
class Writable:
    """The worker's socket takes packets again."""

    worker: int


@dataclass(frozen=True, slots=True)
class PacingTimer:
    """The worker sends packets that its pacing delayed."""

    worker: int


@dataclass(frozen=True, slots=True)
class Lost:
    """The network lost a packet; only a trace has this event."""

    packet: Packet


Event = Packet | Call | Timer | Writable | PacingTimer | Lost


@dataclass(frozen=True, slots=True)
class Record:
    """One event that has happened, for a trace."""

    when_ns: int
    event: Event
    verdict: Verdict | None = None

    def __str__(self) -> str:
        what = str(self.event)
        if isinstance(self.event, Packet):
            what = describe(self.event)
        elif isinstance(self.event, Lost):
            what = f"lost: {describe(self.event.packet)}"
        became = "" if self.verdict is None else f": {self.verdict.outcome}"
        reason = "" if self.verdict is None or self.verdict.outcome != "dropped" else f" ({self.verdict.drop})"
        return f"{self.when_ns:>12} ns  {what}{became}{reason}"


@dataclass(frozen=True)
class Summary:
    events: int
    duration_ns: int
    packets: Counter[str]  # by fate
    drops: Counter[str]  # by place and reason
    timeouts: int
    retransmissions: int

    def __str__(self) -> str:
        packets = " ".join(f"{name}={count}" for name, count in sorted(self.packets.items()))
        drops = " ".join(f"{name}={count}" for name, count in sorted(self.drops.items())) or "none"
        return (
            f"ok  events={self.events} virtual_ms={self.duration_ns / 1e6:.3f}  packets: {packets}  drops: {drops}  "
            f"timeouts={self.timeouts} retransmissions={self.retransmissions}"
        )


class Simulation:
    """Run the production machines through one schedule; raise SimulationError at the first broken promise.

    operations: called by every worker in this order.
    calls_ns: by worker, when it calls each operation; by default all at 0. Stragglers have later times.
    deliveries: the fate of each packet, in order of sending. Without deliveries in the end the run stops at
        `max_events`.
    injected: packets that no machine sent: garbage, forgeries, an earlier generation's; each must be `must_drop`.
    replay: the command that repeats this run, for the text of a failure.
    watch: called with every event after it has happened.
    leaves: the number of workers below each leaf, in order; the switch is then the root. Empty: no leaves.
    how: window, payload_bytes, and the options of `Harness`.
    """

    def __init__(
        self,
        *,
        workers: int,
        operations: Sequence[Operation],
        deliveries: DeliverySource,
        calls_ns: Sequence[Sequence[int]] | None = None,
        injected: Sequence[tuple[int, Packet]] = (),
        latency_ns: int = LATENCY_NS,
        max_events: int | None = None,
        replay: str = "",
        watch: Callable[[Record], None] | None = None,
        leaves: Sequence[int] = (),
        **how: Any,
    ) -> None:
        how.update(workers=workers, operations=operations)
        self.harness: Harness = TreeHarness(leaves=leaves, **how) if leaves else Harness(**how)
        self.clock: Clock[Event] = Clock()
        self.network = Network(self.clock, deliveries, latency_ns)
        self._replay = replay
        self._watch = watch
        self._past: deque[Record] = deque(maxlen=_REMEMBERED_EVENTS)
        self._lost: list[Packet] = []  # packets that the current event sent and the network lost
        self._events = 0
        packets = 2 * workers * len(self.harness.chunks)
        self._max_events = max_events or 10_000 + 100 * packets + 4 * len(injected)
        self._timer_ns: list[int | None] = [None] * workers
        self._paced_ns: list[int | None] = [None] * workers
        self._socket_full = [False] * workers

        for worker in range(workers):
            times = [0] * len(operations) if calls_ns is None else calls_ns[worker]
            if len(times) != len(operations):
                raise ValueError(f"worker {worker} calls {len(times)} operations, expected {len(operations)}")
            for when_ns in times:
                self.clock.at(when_ns, Call(worker))
        for when_ns, packet in injected:
            if not packet.must_drop:
                raise ValueError(f"an injected packet is not must_drop: {describe(packet)}")
            self.clock.at(when_ns, packet)

    def run(self) -> Summary:
        """Run until no event is due, so that the last late packet has arrived and changed nothing."""
        try:
            while (event := self.clock.next()) is not None:
                self._events += 1
                if self._events > self._max_events:
                    raise InvariantError(f"the run did not end within {self._max_events} events")
                self._happen(event)
            self.harness.check_finished(self.clock.now_ns)
        except InvariantError as broken:
            raise SimulationError(self._report(broken)) from broken
        return Summary(
            events=self._events,
            duration_ns=self.clock.now_ns,
            packets=self.network.counts,
            drops=self.harness.drops,
            timeouts=sum(side.timeouts for side in self.harness.workers),
            retransmissions=sum(side.sent_again for side in self.harness.workers),
        )

    def _happen(self, event: Event) -> None:
        harness, now_ns = self.harness, self.clock.now_ns
        self._past.append(Record(now_ns, event))  # before it happens, so that a failure shows its event
        verdict = None
        match event:
            case Packet(to=to):
                verdict = harness.arrive(event, now_ns)
                self._past[-1] = Record(now_ns, event, verdict)
                for answer in verdict.answers:
                    self._give(answer)
                if to >= 0:
                    self._serve(to)
            case Call(worker):
                harness.submit(worker)
                self._serve(worker)
            case Timer(worker):
                if self._timer_ns[worker] == now_ns:  # else an earlier timer was set since, and that one counts
                    self._timer_ns[worker] = None
                harness.timeout(worker, now_ns)
                self._serve(worker)
            case Writable(worker):
                self._socket_full[worker] = False
                self._serve(worker)
            case PacingTimer(worker):
                if self._paced_ns[worker] == now_ns:
                    self._paced_ns[worker] = None
                self._serve(worker)
        if self._watch is not None:
            self._watch(self._past[-1])
            for packet in self._lost:
                self._watch(Record(now_ns, Lost(packet)))
        self._lost.clear()

    def _serve(self, worker: int) -> None:
        """Send the packets that the worker offers, as far as its socket takes them, and set its timers."""
        if not self._socket_full[worker]:
            self._send(worker)
        machine = self.harness.workers[worker].machine
        send_ns: int = machine.next_send_ns()
        waking_ns = self._paced_ns[worker]
        if send_ns >= 0 and not self._socket_full[worker] and (waking_ns is None or send_ns < waking_ns):
            self._paced_ns[worker] = send_ns
            self.clock.at(send_ns, PacingTimer(worker))
        due_ns: int = machine.poll_timeout()
        set_ns = self._timer_ns[worker]
        # A timer that expires too early is harmless, and is then set again.
        if due_ns >= 0 and (set_ns is None or due_ns < set_ns):
            self._timer_ns[worker] = due_ns
            self.clock.at(due_ns, Timer(worker))

    def _send(self, worker: int) -> None:
        offers = self.harness.offers(worker, self.clock.now_ns)
        for index, offer in enumerate(offers):
            if self._give(offer.packet):
                self.harness.sent(worker, offer)
                continue
            for refused in offers[index:]:
                self.harness.not_sent(worker, refused)
            self._socket_full[worker] = True
            self.clock.at(self.clock.now_ns + _WRITABLE_AFTER_NS, Writable(worker))
            return

    def _give(self, packet: Packet) -> bool:
        """Hand `packet` to the network; return False where the socket refused it."""
        lost = self.network.counts["lost"]
        is_sent = self.network.send(packet)
        if self.network.counts["lost"] > lost:
            self._lost.append(packet)
        return is_sent

    def _report(self, broken: InvariantError) -> str:
        lines = [str(broken), f"at {self.clock.now_ns} ns, event {self._events}"]
        if self._replay:
            lines.append(f"replay: {self._replay}")
        lines += self.harness.state()
        lines.append(f"the last {len(self._past)} events:")
        lines += [f"  {record}" for record in self._past]
        return "\n".join(lines)
