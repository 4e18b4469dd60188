"""The libfabric providers over which a switch takes packets, beside UDP."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from netfold._native import fabric
from netfold.switch_protocol.data_path import without_strict


class Fabrics:
    """The providers that a switch serves.

    names: as in NETFOLD_TRANSPORT=fabric:NAME.
    host: the address where the switch listens.
    Raises ValueError, with the provider's text, for a provider that is unavailable on this host.
    """

    def __init__(self, names: Sequence[str], host: str) -> None:
        self._names: dict[str, str] = {}  # by the provider that libfabric chooses for the name
        for name in names:
            try:
                provider = fabric.StreamMux(name, [_address(host)]).provider
            except fabric.FabricError as error:
                raise ValueError(f"--fabric {name}: {error}") from None
            self._names[without_strict(provider)] = name

    @property
    def providers(self) -> list[str]:
        return list(self._names)

    def name_of(self, provider: str) -> str | None:
        """Return this switch's name of a worker's provider; None where the switch does not serve it."""
        return self._names.get(without_strict(provider))

    def __str__(self) -> str:
        return ", ".join(["UDP", *(f"provider {provider}" for provider in self._names)])


def _address(host: str) -> str:
    """Return `host` where it is one address of this host, and loopback for a wildcard or a name."""
    try:
        return "127.0.0.1" if ipaddress.ip_address(host).is_unspecified else host
    except ValueError:
        return "127.0.0.1"
