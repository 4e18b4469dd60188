"""sitecustomize of every process of a sanitized run: netfold comes from the sanitized build."""

import atexit
import ctypes
import multiprocessing.util
import sys
from pathlib import Path

# The import hook of an editable install runs before sys.path is searched.
sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__name__ != "ScikitBuildRedirectingFinder"]

import netfold._native  # noqa: E402

assert Path(netfold._native.__file__).is_relative_to(Path(__file__).parent), netfold._native.__file__

_look = getattr(ctypes.CDLL(None), "__lsan_do_recoverable_leak_check", None)


def _look_for_leaks_at_the_end(_: object = None) -> None:
    # A process of multiprocessing ends by _exit, after its finalizers. It does not inherit its parent's.
    multiprocessing.util.Finalize(None, _look, exitpriority=-1000)


if _look is not None:
    # Before the interpreter frees its objects: memory that they reach is no leak.
    atexit.register(_look)
    multiprocessing.util.register_after_fork(_look_for_leaks_at_the_end, _look_for_leaks_at_the_end)
