"""The cost model that chooses algorithms at run time: (operation, size) -> algorithm, wire format, reason.

`cost` has the formulas, `topology` what they know of ranks and links, `fit` makes a link of a probe's samples,
`overrides` reads NETFOLD_ALGORITHM, `choice_table` is the choice. The planner (plan) uses the same formulas.
May import: NumPy and the native engine. Never plan.

Always: all ranks of a group hold the same immutable table; rank 0 makes it, its hash travels with every operation; a
choice can be printed with its reason; a formula is written once.

Tests: `.venv/bin/pytest tests/tuning`
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
    format_seconds,
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
    "format_seconds",
    "ring_bytes_per_s",
    "table_without_switch",
]
