"""The newest generation of a job in a store that outlives ranks: where newcomers find members.

Rank 0 writes it before its generation forms. Writing never delays a job whose store is lost: then no newcomers come.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from typing import NamedTuple

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


class NewestGeneration:
    """A process's access to it. Thread-safe."""

    def __init__(self, store: Store | None) -> None:
        """store: None for a job without newcomers."""
        self._store = store
        self._lock = threading.Lock()
        self._written = 0

    @property
    def is_kept(self) -> bool:
        return self._store is not None

    def read(self) -> Newest | None:
        """None where the store does not answer, or there is none. May wait as long as the store's own timeouts."""
        if self._store is None:
            return None
        try:
            read = json.loads(self._store.get(_KEY, 0.0))
            return Newest(int(read["generation"]), [str(each) for each in read["handles"]])
        except TimeoutError:
            return Newest(0, [])
        except Exception:  # the errors of stores have no common base
            return None

    def write(self, generation: int, handles: Sequence[str], *, waits: bool) -> None:
        """Begin to write. waits: until it is written, or the store has not answered for _WRITE_S."""
        store = self._store
        if store is None:
            return
        text = json.dumps({"generation": generation, "handles": messages.page(handles, 0)}).encode()

        def write() -> None:
            with self._lock:
                if generation > self._written:
                    try:
                        store.set(_KEY, text)
                    except Exception:  # as above
                        return
                    self._written = generation

        thread = threading.Thread(target=write, name="netfold members", daemon=True)
        thread.start()
        if waits:
            thread.join(_WRITE_S)
