"""Parse NETFOLD_ALGORITHM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from netfold.tuning.cost import NOT_BETWEEN


@dataclass(frozen=True)
class Overrides:
    """Requested algorithms. `hierarchical:NAME` also requests the algorithm between hosts."""

    everywhere: str | None  # for every operation that it supports
    of: Mapping[str, str]  # by operation

    def algorithm(self, operation: str) -> str | None:
        value = self._value(operation)
        return None if value is None else value.partition(":")[0]

    def between(self, operation: str) -> str | None:
        """The requested algorithm of a hierarchical `operation` between hosts; None: the cheapest."""
        return (self._value(operation) or "").partition(":")[2] or None

    def names(self, algorithm: str) -> bool:
        """Whether `algorithm` is requested for any operation, between all of its ranks."""
        return algorithm == self.everywhere or algorithm in self.of.values()

    def setting(self, operation: str) -> str:
        """The setting as the user wrote it, for reasons and errors."""
        if operation in self.of:
            return f"NETFOLD_ALGORITHM={operation}={self.of[operation]}"
        return f"NETFOLD_ALGORITHM={self.everywhere}"

    def _value(self, operation: str) -> str | None:
        return self.of.get(operation, self.everywhere)


def parse_overrides(text: str, supports: Mapping[str, Sequence[str]], operations: Sequence[str]) -> Overrides:
    """Parse `auto`, an algorithm, or comma-separated operation=algorithm pairs.

    supports: the operations of each algorithm.
    Raises ValueError for unknown names and unsupported pairs.
    """
    known = ["auto", *(name for name in supports if name != "local" and any(o in operations for o in supports[name]))]
    if "=" not in text:
        algorithm, _, between = text.partition(":")
        if algorithm not in known:
            raise ValueError(
                f"NETFOLD_ALGORITHM={text!r} is not one of {', '.join(known)}, nor operation=algorithm,..."
            )
        _check_between(text, algorithm, between, known[1:])
        return Overrides(None if text == "auto" else text, {})
    of: dict[str, str] = {}
    for pair in text.split(","):
        operation, _, value = (part.strip() for part in pair.partition("="))
        algorithm, _, between = value.partition(":")
        if operation not in operations:
            raise ValueError(
                f"NETFOLD_ALGORITHM={text!r}: {operation!r} is not an operation; there are {', '.join(operations)}"
            )
        if algorithm not in known:
            raise ValueError(f"NETFOLD_ALGORITHM={text!r}: {algorithm!r} is not one of {', '.join(known)}")
        if algorithm == "auto":
            continue
        able = [name for name in known if name != "auto" and operation in supports[name]]
        if operation not in supports[algorithm]:
            raise ValueError(
                f"NETFOLD_ALGORITHM={text!r}: there is no {operation} by {algorithm}; there are {', '.join(able)}"
            )
        _check_between(text, algorithm, between, able)
        of[operation] = value
    return Overrides(None, of)


def _check_between(text: str, algorithm: str, between: str, able: list[str]) -> None:
    if not between:
        return
    able = [name for name in able if name not in NOT_BETWEEN]
    if algorithm != "hierarchical":
        raise ValueError(
            f"NETFOLD_ALGORITHM={text!r}: only hierarchical takes an algorithm between hosts: hierarchical:{between}"
        )
    if between not in able:
        raise ValueError(
            f"NETFOLD_ALGORITHM={text!r}: {between!r} cannot run between hosts; there are {', '.join(able)}"
        )
