"""netfold: the network part of a training job.

A collective-communication backend that can add up gradients inside the network. `import netfold` loads nothing heavy;
with torch, `init_process_group("netfold")` needs no import at all.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from netfold.communicator import Communicator, FileStore, Options, empty
    from netfold.profile import _Callable

    profile: _Callable  # for checkers, to whom no module can be called
    __version__: str

__all__ = ["Communicator", "FileStore", "Options", "__version__", "empty", "profile"]


def __getattr__(name: str) -> Any:
    # torch's plugin loader imports this package in every process that imports torch: it must stay light.
    if name == "profile":
        return import_module("netfold.profile")  # a room that can be called
    if name == "__version__":
        # pyproject.toml has the version; an installed package has it in its metadata.
        return import_module("importlib.metadata").version("netfold")
    if name in __all__:
        return getattr(import_module("netfold.communicator"), name)
    raise AttributeError(f"module 'netfold' has no attribute {name!r}")
