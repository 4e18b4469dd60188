"""What NETFOLD_ALGORITHM asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# What a hierarchical operation does not take between hosts.
_WITHIN = ("auto", "hierarchical", "shared_memory")


@dataclass(frozen=True)
class Overrides:
    """everywhere: for every operation it can do, or None; of: for one operation each.

    Of a hierarchical one the algorithm between hosts may be named behind a colon.
    """

    everywhere: str | None
    of: Mapping[str, str]
    text: str

    def asked(self, operation: str) -> str | None:
        word = self._word(operation)
        return None if word is None else word.partition(":")[0]

    def between(self, operation: str) -> str | None:
        """What a hierarchical `operation` is to take between hosts; None: the cheapest."""
        return (self._word(operation) or "").partition(":")[2] or None

    def asks(self, algorithm: str) -> bool:
        """Whether any operation is to run by `algorithm`, all of it."""
        return algorithm == self.everywhere or algorithm in self.of.values()

    def named(self, operation: str) -> str:
        """As the user wrote it, for reasons."""
        if operation in self.of:
            return f"NETFOLD_ALGORITHM={operation}={self.of[operation]}"
        return f"NETFOLD_ALGORITHM={self.everywhere}"

    def _word(self, operation: str) -> str | None:
        return self.of.get(operation, self.everywhere)


def parse_overrides(text: str, supports: Mapping[str, Sequence[str]], operations: Sequence[str]) -> Overrides:
    """`auto`, an algorithm, or operation=algorithm pairs by commas. `supports`: the operations of each algorithm.

    Raises ValueError, in a sentence, for words that do not exist and pairs that cannot be.
    """
    known = ["auto", *(name for name in supports if name != "local" and any(o in operations for o in supports[name]))]
    if "=" not in text:
        algorithm, _, between = text.partition(":")
        if algorithm not in known:
            raise ValueError(
                f"NETFOLD_ALGORITHM={text!r} is not one of {', '.join(known)}, nor operation=algorithm,..."
            )
        _check_between(text, algorithm, between, [name for name in known if name not in _WITHIN])
        return Overrides(None if text == "auto" else text, {}, text)
    of: dict[str, str] = {}
    for pair in text.split(","):
        operation, _, word = (part.strip() for part in pair.partition("="))
        algorithm, _, between = word.partition(":")
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
        _check_between(text, algorithm, between, [name for name in able if name not in _WITHIN])
        of[operation] = word
    return Overrides(None, of, text)


def _check_between(text: str, algorithm: str, between: str, able: list[str]) -> None:
    if not between:
        return
    if algorithm != "hierarchical":
        raise ValueError(
            f"NETFOLD_ALGORITHM={text!r}: {algorithm} has no other algorithm between hosts; hierarchical:{between} has"
        )
    if between not in able:
        raise ValueError(
            f"NETFOLD_ALGORITHM={text!r}: {between!r} is nothing between hosts; there are {', '.join(able)}"
        )
