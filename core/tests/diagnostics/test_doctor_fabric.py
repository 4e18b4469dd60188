"""`netfold doctor fabric`: its report on this host's providers."""

from __future__ import annotations

import json

import pytest
from fabrics import need_libfabric
from typer.testing import CliRunner

from netfold._native import fabric
from netfold.cli import app
from netfold.diagnostics import fabric as looked_at

need_libfabric()


def test_each_unusable_provider_has_a_reason() -> None:
    said = json.loads(CliRunner().invoke(app, ["doctor", "fabric", "--output", "json"]).output)
    found = {each["name"]: each for each in said["providers"]}
    assert found["tcp;ofi_rxm"]["why_not"] == ""
    assert "writes to remote memory" in found["tcp;ofi_rxm"]["can"]
    assert found["udp"]["why_not"] == "it offers unreliable datagrams only"
    assert [bool(each["why_not"]) for each in said["providers"]] == sorted(
        bool(each["why_not"]) for each in said["providers"]
    )


def test_the_providers_own_error_is_shown_where_it_cannot_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looked_at, "_LOOPBACK", "203.0.113.1")
    found = {each.name: each for each in looked_at.providers()}
    assert "Cannot assign requested address" in found["tcp;ofi_rxm"].why_not
    assert found["shm"].why_not == ""


def test_without_libfabric_only_the_reason_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> str:
        raise fabric.FabricError("libfabric cannot be opened; install it")

    monkeypatch.setattr(looked_at.fabric, "version", absent)
    run = CliRunner().invoke(app, ["doctor", "fabric"])
    assert run.exit_code == 1
    assert run.output == "no fabric: libfabric cannot be opened; install it\n"
