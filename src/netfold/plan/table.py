"""The choice table: immutable rows that every rank of a group reads alike."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass

# What NETFOLD_ALGORITHM and NETFOLD_WIRE may say.
ALGORITHMS = ("auto", "direct", "ring", "in_network", "shared_memory")
WIRES = ("auto", "f32", "bf16", "f16")

OPERATIONS = (
    "all_reduce",
    "broadcast",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "reduce",
    "gather",
    "scatter",
    "barrier",
)

# Up to here one exchange of everything beats 2(P-1) steps: with P ranks a ring costs 2(P-1) latencies of about 100 us
# on Ethernet, and this many bytes to each peer less than that.
DIRECT_MAX_BYTES = 16 << 10


@dataclass(frozen=True)
class Row:
    """From `min_bytes` on, `operation` runs by `algorithm` in `wire`; `auto` is the tensor's own dtype."""

    operation: str
    min_bytes: int
    algorithm: str
    wire: str
    reason: str


@dataclass(frozen=True)
class ChoiceTable:
    rows: tuple[Row, ...]

    def choose(self, operation: str, size_bytes: int) -> Row:
        """The row in force; KeyError for an operation that does not exist."""
        fitting = [row for row in self.rows if row.operation == operation and row.min_bytes <= size_bytes]
        if not fitting:
            raise KeyError(f"no operation {operation!r}; there are {', '.join(OPERATIONS)}")
        return max(fitting, key=lambda row: row.min_bytes)

    @property
    def hash16(self) -> int:
        """What travels with every packet and message. Reasons count: ranks that differ in them differ in something."""
        return int.from_bytes(hashlib.sha256(self.to_json().encode()).digest()[:2], "big")

    def to_json(self) -> str:
        return json.dumps([asdict(row) for row in self.rows], sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> ChoiceTable:
        return cls(tuple(Row(**row) for row in json.loads(text)))


def build_table(
    *, ranks: int, switch: str | None, algorithm: str = "auto", wire: str = "auto", shared: bool = False
) -> ChoiceTable:
    """The table of a group of `ranks`, with `switch` its aggregator's address or None; `shared`: all are on one node.

    Raises ValueError, in a sentence, where what was asked for cannot be done: nothing else is done instead.
    """
    if algorithm not in ALGORITHMS:
        raise ValueError(f"NETFOLD_ALGORITHM={algorithm!r} is not one of {', '.join(ALGORITHMS)}")
    if wire not in WIRES:
        raise ValueError(f"NETFOLD_WIRE={wire!r} is not one of {', '.join(WIRES)}")
    if algorithm == "in_network" and switch is None:
        raise ValueError(
            "NETFOLD_ALGORITHM=in_network needs an aggregator: start `netfold switch` and set NETFOLD_SWITCH=host:port"
        )
    if algorithm == "shared_memory" and not shared and ranks > 1:
        raise ValueError(
            "NETFOLD_ALGORITHM=shared_memory needs ranks that share memory: these are in several machines or "
            "containers, or NETFOLD_TRANSPORT=tcp keeps them apart"
        )
    if algorithm == "shared_memory" and wire != "auto":
        raise ValueError(f"in shared memory tensors stay as they are; NETFOLD_WIRE={wire} needs ring or in_network")
    in_wire = "" if wire == "auto" else f"; f32 tensors travel as {wire} (NETFOLD_WIRE)"
    rows = []
    if ranks == 1:
        rows.append(Row("all_reduce", 0, "local", "auto", "a group of one rank"))
    elif algorithm == "direct":
        # Direct adds what was sent as it is; it has no narrower format.
        if wire != "auto":
            raise ValueError(
                f"NETFOLD_ALGORITHM=direct sends tensors as they are; NETFOLD_WIRE={wire} needs ring or in_network"
            )
        rows.append(Row("all_reduce", 0, "direct", "auto", "NETFOLD_ALGORITHM=direct"))
    elif algorithm == "ring":
        rows.append(Row("all_reduce", 0, "ring", wire, "NETFOLD_ALGORITHM=ring" + in_wire))
    elif switch is not None:
        asked = "NETFOLD_ALGORITHM=in_network" if algorithm == "in_network" else f"NETFOLD_SWITCH={switch}"
        reason = f"{asked}: a rank sends n bytes through the switch, where a ring sends 2n(P-1)/P"
        rows.append(Row("all_reduce", 0, "in_network", wire, reason + in_wire))
    elif wire == "auto" and shared:
        asked = "NETFOLD_ALGORITHM=shared_memory; " if algorithm == "shared_memory" else ""
        rows.append(Row("all_reduce", 0, "shared_memory", "auto", asked + "all ranks share memory"))
    else:
        if wire == "auto":
            rows.append(
                Row(
                    "all_reduce",
                    0,
                    "direct",
                    "auto",
                    f"up to {DIRECT_MAX_BYTES >> 10} KB latency counts: one step",
                )
            )
        rows.append(
            Row(
                "all_reduce",
                DIRECT_MAX_BYTES + 1 if wire == "auto" else 0,
                "ring",
                wire,
                "no NETFOLD_SWITCH; a ring sends the fewest bytes of all host algorithms, 2n(P-1)/P" + in_wire,
            )
        )
    for operation in OPERATIONS[1:]:
        if ranks == 1:
            rows.append(Row(operation, 0, "local", "auto", "a group of one rank"))
        elif shared and algorithm in ("auto", "shared_memory", "in_network"):
            rows.append(Row(operation, 0, "shared_memory", "auto", "all ranks share memory"))
        else:
            rows.append(Row(operation, 0, "direct", "auto", "the one host algorithm there is for it"))
    return ChoiceTable(tuple(rows))
