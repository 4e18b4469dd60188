"""What libfabric offers on this host, and whether netfold can go over it: asked, then tried.

A provider that could be used says a word to itself: what it wants and does not get (a driver, locked memory, a device
file) shows then, in its own words.
"""

from __future__ import annotations

from dataclasses import dataclass

from netfold._native import fabric

_TRY_NS = 2_000_000_000
_WORD = b"netfold"
# Where a provider goes by addresses, it is tried within this host.
_HERE = "127.0.0.1"


@dataclass(frozen=True)
class Provider:
    """One provider, over all devices on which it says the same."""

    name: str
    version: str
    devices: tuple[str, ...]
    can: tuple[str, ...]
    why_not: str  # empty: it can be used


def library() -> tuple[str, str]:
    """The version of libfabric, and why there is none: one of the two is empty."""
    try:
        return fabric.version(), ""
    except fabric.FabricError as error:
        return "", str(error)


def providers() -> list[Provider]:
    """Those that can be used first. FabricError without a library."""
    found: dict[tuple[str, str], list[dict[str, object]]] = {}
    for one in fabric.providers():
        found.setdefault((one["name"], one["why_not"]), []).append(one)
    # What it offers beside what can be used is of no interest.
    usable = {name for name, why_not in found if not why_not}
    out = []
    for (name, why_not), entries in found.items():
        if why_not and name in usable:
            continue
        devices = tuple(dict.fromkeys(str(entry["domain"]) for entry in entries))
        out.append(Provider(name, str(entries[0]["version"]), devices, _can(entries[0]), why_not or _tried(name)))
    return sorted(out, key=lambda each: bool(each.why_not))


def _can(entry: dict[str, object]) -> tuple[str, ...]:
    can = ["writes to remote memory"] if entry["can_write"] else []
    can.append("moves data only when asked to" if entry["manual"] else "moves data by itself")
    registration = entry["registration"]
    assert isinstance(registration, list)
    if registration:
        can.append(f"wants registered memory ({', '.join(registration)})")
    return tuple(can)


def _tried(name: str) -> str:
    """Why it does not carry a word from here to here; empty where it does."""
    try:
        port = fabric.StreamMux(name, [_HERE])
        bell = fabric.make_doorbell()
        here, there = port.open(bell, 2), port.open(bell, 2)
        here.connect(port.names, there.params)
        there.connect(port.names, here.params)
        here.send(_WORD, _TRY_NS)
        if there.receive(len(_WORD), _TRY_NS) != _WORD:
            return f"a word to itself did not come within {_TRY_NS // 10**9} s"
        here.close()
        there.close()
    except fabric.FabricError as error:
        return str(error)
    return ""
