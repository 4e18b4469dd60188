"""A run made from one seed and a few parameters, which its replay command names."""

from __future__ import annotations

import random
from dataclasses import dataclass, fields
from typing import Any

from netfold_plan.sim import values
from netfold_plan.sim.harness import Operation
from netfold_plan.sim.network import LATENCY_NS, Ratios, SeededDeliveries
from netfold_plan.sim.simulation import Simulation


@dataclass(frozen=True)
class Scenario:
    """All parameters of a run. Each field is an option of `python -m netfold_plan.sim` of the same name."""

    seed: int = 0
    workers: int = 4
    window: int = 4
    payload_bytes: int = 32
    operations: int = 6
    max_elements: int = 200  # of an operation; each draws its length from 1 to this
    wire: str = "any"  # one wire format for all; "any": each operation draws its own, and its reduction
    loss: float = 0.02
    duplicate: float = 0.02
    delay: float = 0.05
    extra_delay_us: int = 500  # the longest delay
    truncate: float = 0.005
    corrupt: float = 0.005
    refuse: float = 0.01  # the socket is full
    leaves: str = ""  # workers below each leaf, as "2,2"; "": one switch for all
    straggle_ms: float = 0.0  # the longest time between two calls of a worker

    def __post_init__(self) -> None:
        if self.wire != "any" and self.wire not in values.WIRES:
            raise ValueError(f"no wire format {self.wire!r}; there are any, {', '.join(values.WIRES)}")
        for name in ("operations", "max_elements"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is at least 1, not {getattr(self, name)}")
        if self.leaves and sum(self.below) != self.workers:
            raise ValueError(f"leaves {self.leaves} have {sum(self.below)} workers below them, not {self.workers}")
        self._ratios()  # raises ValueError for an invalid ratio

    @property
    def below(self) -> tuple[int, ...]:
        """The number of workers below each leaf."""
        return tuple(int(workers) for workers in self.leaves.split(",")) if self.leaves else ()

    def command(self) -> str:
        """Return the replay command: the seed, and the options that differ from their defaults."""
        options = [f"--seed {self.seed}"]
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "seed" and value != field.default:
                options.append(f"--{field.name.replace('_', '-')} {value}")
        return "python -m netfold_plan.sim " + " ".join(options)

    def simulation(self, **how: Any) -> Simulation:
        """Return the run, ready to start.

        how: compare_machines, max_events, watch of `Simulation`.
        """
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
        ratios = (self.loss, self.duplicate, self.delay, self.truncate, self.corrupt, self.refuse)
        return Ratios(*ratios, extra_delay_ns=max(1, self.extra_delay_us * 1000))

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
