"""What NETFOLD_ALGORITHM asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Overrides:
    """everywhere: for every operation it can do, or None; of: for one operation each."""

    everywhere: str | None
    of: Mapping[str, str]
    text: str

    def asked(self, operation: str) -> str | None:
        return self.of.get(operation, self.everywhere)

    def asks(self, algorithm: str) -> bool:
        """Whether any operation is to run by `algorithm`."""
        return algorithm == self.everywhere or algorithm in self.of.values()

    def named(self, operation: str) -> str:
        """As the user wrote it, for reasons."""
        if operation in self.of:
            return f"NETFOLD_ALGORITHM={operation}={self.of[operation]}"
        return f"NETFOLD_ALGORITHM={self.everywhere}"


def parse_overrides(text: str, supports: Mapping[str, Sequence[str]], operations: Sequence[str]) -> Overrides:
    """`auto`, an algorithm, or operation=algorithm pairs by commas. `supports`: the operations of each algorithm.

    Raises ValueError, in a sentence, for words that do not exist and pairs that cannot be.
    """
    known = ["auto", *(name for name in supports if name != "local" and any(o in operations for o in supports[name]))]
    if "=" not in text:
        if text not in known:
            raise ValueError(
                f"NETFOLD_ALGORITHM={text!r} is not one of {', '.join(known)}, nor operation=algorithm,..."
            )
        return Overrides(None if text == "auto" else text, {}, text)
    of: dict[str, str] = {}
    for pair in text.split(","):
        operation, _, algorithm = (word.strip() for word in pair.partition("="))
        if operation not in operations:
            raise ValueError(
                f"NETFOLD_ALGORITHM={text!r}: {operation!r} is not an operation; there are {', '.join(operations)}"
            )
        if algorithm not in known:
            raise ValueError(f"NETFOLD_ALGORITHM={text!r}: {algorithm!r} is not one of {', '.join(known)}")
        if algorithm == "auto":
            continue
        if operation not in supports[algorithm]:
            able = [name for name in known if name != "auto" and operation in supports[name]]
            raise ValueError(
                f"NETFOLD_ALGORITHM={text!r}: there is no {operation} by {algorithm}; there are {', '.join(able)}"
            )
        of[operation] = algorithm
    return Overrides(None, of, text)
