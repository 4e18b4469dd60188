"""Simulate several hosts on one machine: ranks that do not find each other's memory."""

from __future__ import annotations

from typing import Any

from netfold.bootstrap import shm_discovery


def apart(layout: tuple[int, ...]) -> tuple[Any, str, property]:
    """The arguments of `setattr` that let a rank share memory only within its host. layout: the host of each rank."""
    return shm_discovery.NodeSocket, "host", property(lambda own: f"host {layout[own.rank]}")
