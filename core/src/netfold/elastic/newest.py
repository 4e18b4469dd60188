"""The newest generation of a job in a store that outlives ranks: where newcomers find members.

Rank 0 writes it before its generation forms. Writing never delays a job whose store is lost: then no newcomers come.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

from netfold.bootstrap.store import Store
from netfold.elastic import messages

_KEY = "elastic/newest"
# How long rank 0 waits for the store before a generation with newcomers forms.
_WRITE_S = 2.0


class Newest(NamedTuple):
    generation: int
    """0: no generation has formed."""
    handles: list[str]
    """Of the first members, as many as a value of the store holds."""
    is_whole: bool
    """Whether these are the handles of all members."""
    is_over: bool = False
    """The job is done, and there is no generation any more."""


class NewestGeneration:
    """A process's access to it. Thread-safe."""

    def __init__(self, store: Store | None) -> None:
        """store: None for a job without newcomers."""
        self._store = store
        self._lock = threading.Lock()
        self._written = 0, False  # a generation, and whether the job was over

    @property
    def is_kept(self) -> bool:
        return self._store is not None

    def read(self) -> Newest | None:
        """None where the store does not answer, or there is none. May wait as long as the store's own timeouts."""
        if self._store is None:
            return None
        try:
            read = json.loads(self._store.get(_KEY, 0.0))
            handles = [str(each) for each in read["handles"]]
            is_whole = len(handles) == int(read["size"])
            return Newest(int(read["generation"]), handles, is_whole, bool(read["over"]))
        except TimeoutError:
            return Newest(0, [], False)
        except Exception:  # the errors of stores have no common base
            return None

    def write(self, generation: int, handles: Sequence[str], *, waits: bool) -> None:
        """Begin to write. waits: until it is written, or the store has not answered for _WRITE_S."""
        page = messages.page(handles, 0)
        self._write({"generation": generation, "size": len(handles), "handles": page, "over": False}, waits=waits)

    def end(self, generation: int) -> None:
        """Write that the job is done, after this generation. Waits as `write`."""
        self._write({"generation": generation, "size": 0, "handles": [], "over": True}, waits=True)

    def _write(self, value: dict[str, Any], *, waits: bool) -> None:
        store = self._store
        if store is None:
            return
        order = int(value["generation"]), bool(value["over"])

        def write() -> None:
            with self._lock:
                if order > self._written:
                    try:
                        store.set(_KEY, json.dumps(value).encode())
                    except Exception:  # as above
                        return
                    self._written = order

        thread = threading.Thread(target=write, name="netfold members", daemon=True)
        thread.start()
        if waits:
            thread.join(_WRITE_S)
