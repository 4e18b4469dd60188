"""The providers of libfabric over which a switch takes packets, beside UDP."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from netfold._native import fabric
from netfold.switch_protocol.data_path import without_strict


class Fabrics:
    """names: as in NETFOLD_TRANSPORT=fabric:NAME. host: where the switch listens. ValueError for one that cannot be had
    here, with the provider's words."""

    def __init__(self, names: Sequence[str], host: str) -> None:
        self._names: dict[str, str] = {}  # by the provider that it comes to
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
        """What this switch calls the provider that a worker goes over; None where it does not serve that."""
        return self._names.get(without_strict(provider))

    def __str__(self) -> str:
        return ", ".join(["UDP", *(f"provider {provider}" for provider in self._names)])


def _address(host: str) -> str:
    """One of this host's, where `host` is one; for what may be any, or a name, one that is always there."""
    try:
        return "127.0.0.1" if ipaddress.ip_address(host).is_unspecified else host
    except ValueError:
        return "127.0.0.1"
