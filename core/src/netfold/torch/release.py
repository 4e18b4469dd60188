"""The releases of torch under which the backend runs. May import: torch, for its version."""

from __future__ import annotations

import functools
import warnings

# The first is pyproject.toml's bound (a test compares them); the second the newest that `make test-torch` has run with.
OLDEST = (2, 10)
NEWEST_TESTED = (2, 15)


def check_release(rank: int) -> None:
    """Raise RuntimeError for a torch older than OLDEST; on rank 0, warn once of one newer than NEWEST_TESTED.

    Called before any other module of the backend is loaded: those import names that an older torch does not have.
    """
    import torch

    _check(str(torch.__version__), rank == 0)


@functools.cache
def _check(version: str, warns: bool) -> None:
    release = tuple(int(part) for part in version.split(".")[:2])
    if release < OLDEST:
        raise RuntimeError(
            f"netfold needs torch {_dotted(OLDEST)} or newer, and this is {version}: pip install --upgrade torch"
        )
    if release > NEWEST_TESTED and warns:
        warnings.warn(
            f"torch {version} is newer than {_dotted(NEWEST_TESTED)}, the newest that this netfold was tested with; "
            "if a collective fails here, try a newer netfold or that torch",
            RuntimeWarning,
            stacklevel=1,
        )


def _dotted(release: tuple[int, int]) -> str:
    return f"{release[0]}.{release[1]}"
