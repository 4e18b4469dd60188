"""The choice of algorithms: (operation, size) -> algorithm, wire format, reason.

May import NumPy at run time, and no room of ours. Always: all ranks of a group hold the same immutable table; rank 0
makes it, its hash travels with every operation; a choice can be printed with its reason.

Tests: `.venv/bin/pytest tests/plan`
"""

from netfold.plan.table import ALGORITHMS, WIRES, ChoiceTable, Row, build_table

__all__ = ["ALGORITHMS", "WIRES", "ChoiceTable", "Row", "build_table"]
