"""The cost model that chooses algorithms at run time: (operation, size) -> algorithm, wire format, reason.

`cost` holds the formulas, `topology` their input about ranks and links. `fit` fits a link to a probe's samples.
`overrides` parses NETFOLD_ALGORITHM. `choice_table` makes the choice. The planner (netfold-plan) uses the same
formulas. `profile_link` finds the link that a profile shows, `measured_link` reads one of a measurement, and `advice`
predicts from a profile. May import: NumPy, the native engine, profile and units.

Always: all ranks of a group hold the same immutable table, which rank 0 makes; the table's hash travels with every
operation; every choice has a printable reason; a formula is written once.

Tests: `.venv/bin/pytest core/tests/tuning`
"""

from netfold.tuning.choice_table import (
    OPERATIONS,
    SUPPORTS,
    WIRES,
    Candidate,
    ChoiceTable,
    Row,
    build_table,
    candidates,
    check_words,
    table_without_switch,
)
from netfold.tuning.cost import ring_bytes_per_s
from netfold.tuning.fit import fit_link
from netfold.tuning.topology import DEFAULT_LINKS, Link, Links, Topology

__all__ = [
    "DEFAULT_LINKS",
    "OPERATIONS",
    "SUPPORTS",
    "WIRES",
    "Candidate",
    "ChoiceTable",
    "Link",
    "Links",
    "Row",
    "Topology",
    "build_table",
    "candidates",
    "check_words",
    "fit_link",
    "ring_bytes_per_s",
    "table_without_switch",
]
