"""A bench's ranks: its own file once more, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping


def run_own_ranks(
    file: str, size: int, *arguments: object, deadline_s: float, env: Mapping[str, str] | None = None
) -> None:
    """`python file rank R *arguments` for each R below `size`, with `env` in place of all of netfold's own variables.

    RuntimeError with the statuses, if not all end well; none is left behind.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith("NETFOLD_")}
    command = [sys.executable, "-W", "ignore", os.path.abspath(file), "rank"]
    ranks = [
        subprocess.Popen([*command, str(rank), *map(str, arguments)], env={**kept, **(env or {})})
        for rank in range(size)
    ]
    try:
        ended = [rank.wait(deadline_s) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    if any(ended):
        raise RuntimeError(f"ranks ended with {ended}")
