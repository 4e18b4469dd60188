"""List libfabric's providers on this host, and try those that netfold could use.

The trial sends a message within this process. A missing driver, locked memory limit or device file shows there, in the
provider's own error text.
"""

from __future__ import annotations

from dataclasses import dataclass

from netfold._native import fabric

_TRIAL_NS = 2_000_000_000
_MESSAGE = b"netfold"
# The trial's address, for providers that use addresses.
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Provider:
    """One provider and all devices with the same `why_not`."""

    name: str
    version: str
    devices: tuple[str, ...]
    can: tuple[str, ...]
    why_not: str  # empty: netfold can use it


def library() -> tuple[str, str]:
    """Return libfabric's version, and the error if it cannot be opened. One of the two is empty."""
    try:
        return fabric.version(), ""
    except fabric.FabricError as error:
        return "", str(error)


def providers() -> list[Provider]:
    """List the providers, usable ones first. Raises FabricError without the library."""
    by_result: dict[tuple[str, str], list[dict[str, object]]] = {}
    for entry in fabric.providers():
        by_result.setdefault((entry["name"], entry["why_not"]), []).append(entry)
    # Skip unusable entries of a provider that also has usable ones.
    usable = {name for name, why_not in by_result if not why_not}
    result = []
    for (name, why_not), entries in by_result.items():
        if why_not and name in usable:
            continue
        devices = tuple(dict.fromkeys(str(entry["domain"]) for entry in entries))
        result.append(Provider(name, str(entries[0]["version"]), devices, _can(entries[0]), why_not or _try(name)))
    return sorted(result, key=lambda each: bool(each.why_not))


def _can(entry: dict[str, object]) -> tuple[str, ...]:
    can = ["writes to remote memory"] if entry["can_write"] else []
    can.append("moves data only when asked to" if entry["manual"] else "moves data by itself")
    registration = entry["registration"]
    assert isinstance(registration, list)
    if registration:
        can.append(f"wants registered memory ({', '.join(registration)})")
    return tuple(can)


def _try(name: str) -> str:
    """Send a message over the provider within this process. Returns the error, empty on success."""
    try:
        mux = fabric.StreamMux(name, [_LOOPBACK])
        doorbell = fabric.make_doorbell()
        sender, receiver = mux.open(doorbell), mux.open(doorbell)
        sender.connect(receiver.offer)
        receiver.connect(sender.offer)
        sender.send(_MESSAGE, _TRIAL_NS)
        if receiver.receive(len(_MESSAGE), _TRIAL_NS) != _MESSAGE:
            return f"a message to itself did not arrive within {_TRIAL_NS // 10**9} s"
        sender.close()
        receiver.close()
    except fabric.FabricError as error:
        return str(error)
    return ""
