"""A run made from one seed and a few numbers: what a replay command names."""

from __future__ import annotations

import random
from dataclasses import dataclass, fields
from typing import Any

from netfold.sim import values
from netfold.sim.harness import Operation
from netfold.sim.network import LATENCY_NS, Ratios, SeededDeliveries
from netfold.sim.simulation import Simulation


@dataclass(frozen=True)
class Scenario:
    """Everything that decides a run. Each field is an option of `python -m netfold.sim`, and the other way round."""

    seed: int = 0
    workers: int = 4
    window: int = 4
    payload_bytes: int = 32
    operations: int = 6
    max_elements: int = 200  # each operation draws its length from 1 to this
    wire: str = "any"  # one wire format for all, or "any": each operation draws its own, and its operator
    loss: float = 0.02
    duplicate: float = 0.02
    delay: float = 0.05
    extra_delay_us: int = 500  # the longest delay
    truncate: float = 0.005
    corrupt: float = 0.005
    refuse: float = 0.01  # the socket is full
    leaves: str = ""  # by leaf, how many workers are below it, as "2,2"; none: one switch for all
    straggle_ms: float = 0.0  # a worker calls its next operation up to this much after the one before

    def __post_init__(self) -> None:
        if self.wire != "any" and self.wire not in values.WIRES:
            raise ValueError(f"no wire format {self.wire!r}; there are any, {', '.join(values.WIRES)}")
        for name in ("operations", "max_elements"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is at least 1, not {getattr(self, name)}")
        if self.leaves and sum(self.below) != self.workers:
            raise ValueError(f"leaves {self.leaves} have {sum(self.below)} workers below them, not {self.workers}")
        self._ratios()  # says what is wrong with them

    @property
    def below(self) -> tuple[int, ...]:
        """By leaf, how many workers."""
        return tuple(int(workers) for workers in self.leaves.split(",")) if self.leaves else ()

    def command(self) -> str:
        """The replay command: only what differs from the defaults, and always the seed."""
        options = [f"--seed {self.seed}"]
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "seed" and value != field.default:
                options.append(f"--{field.name.replace('_', '-')} {value}")
        return "python -m netfold.sim " + " ".join(options)

    def simulation(self, **how: Any) -> Simulation:
        """The run, ready to go. `how`: compare_machines, max_events, watch."""
        chance = random.Random(self.seed)
        operations = [self._operation(number, chance) for number in range(self.operations)]
        return Simulation(
            workers=self.workers,
            window=self.window,
            payload_bytes=self.payload_bytes,
            operations=operations,
            calls_ns=[self._calls_ns(chance) for _ in range(self.workers)],
            deliveries=SeededDeliveries(chance, self._ratios()),
            replay=self.command(),
            leaves=self.below,
            **how,
        )

    def _ratios(self) -> Ratios:
        extra_delay_ns = max(1, self.extra_delay_us * 1000)
        return Ratios(
            self.loss,
            self.duplicate,
            self.delay,
            self.truncate,
            self.corrupt,
            self.refuse,
            extra_delay_ns=extra_delay_ns,
        )

    def _operation(self, number: int, chance: random.Random) -> Operation:
        elements = chance.randint(1, self.max_elements)
        if self.wire != "any":
            return Operation(number, elements, self.wire)
        wire = chance.choice(list(values.WIRES))
        reduce = chance.choice([name for name in values.REDUCES if values.is_defined(name, wire)])
        return Operation(number, elements, wire, reduce, table=chance.getrandbits(16))

    def _calls_ns(self, chance: random.Random) -> list[int]:
        when_ns, calls_ns = 0, []
        for _ in range(self.operations):
            when_ns += int(chance.random() * max(self.straggle_ms * 1e6, LATENCY_NS))
            calls_ns.append(when_ns)
        return calls_ns
