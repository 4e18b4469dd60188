"""The replacement of ssh between a rack's hosts: its text, and a command that it runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from load import run, seconds

from netfold_lab.rack import Rack
from netfold_lab.rack.command import why_unavailable
from netfold_lab.rack.remote_shell import named, remote_shell

LACK = why_unavailable(loss=False)


def test_an_address_of_no_host_is_an_error(tmp_path: Path) -> None:
    program = tmp_path / "shell"
    program.write_text(remote_shell("ab", 2))
    done = run(["sh", str(program), "-x", "10.77.0.9", "true"], 10)
    assert done.returncode == 1 and "no host of this rack has the address 10.77.0.9" in done.stderr


@pytest.mark.rack
@pytest.mark.skipif(LACK is not None, reason=str(LACK))
def test_a_command_runs_on_the_host_of_its_address_under_that_hosts_name(tmp_path: Path) -> None:
    with Rack(2, "1gbit") as rack:
        program = tmp_path / "shell"
        program.write_text(remote_shell(rack.rack_id, 2))
        asks = 'echo "$(uname -n)" $(ip -4 -o address show eth0 | grep -o "10.77.0.[0-9]*/" | head -1) "it\'s"'
        there = ["sh", str(program), "-q", "-x", rack.address(1), asks, "two  words"]
        out, _ = rack.popen(0, named(0, ["sh", "-c", 'uname -n; "$@"', "sh", *there])).communicate(timeout=seconds(20))
    assert out.split("\n")[:2] == ["h0", "h1 10.77.0.2/ it's two words"]
