"""netfold: the network part of a training job.

A collective-communication backend that can sum gradients inside the network. `import netfold` loads nothing heavy. With
torch, `init_process_group("netfold")` needs no import at all.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from netfold.communicator import Communicator, FileStore, Options, empty
    from netfold.profile import _Callable

    profile: _Callable  # type checkers do not know callable modules
    __version__: str

__all__ = ["Communicator", "FileStore", "Options", "__version__", "empty", "profile"]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    # torch's plugin loader imports this package in every process that imports torch, so it must load little.
    if name == "profile":
        return import_module("netfold.profile")  # a module that can be called
    if name == "__version__":
        globals()["__version__"] = found = import_module("netfold._native").VERSION
        return found
    if name in __all__:
        return getattr(import_module("netfold.communicator"), name)
    raise AttributeError(f"module 'netfold' has no attribute {name!r}")
