"""deploy/: what the systemd unit lets the switch do, and the health check of the image.

`make test-image` builds the image and tries the same check inside; here it is tried on a switch of this host.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import load
import pytest

from netfold.switch_protocol import control_messages

ROOT = Path(__file__).parents[2]
UNIT = (ROOT / "deploy" / "netfold-switch.service").read_text()
CONTAINERFILE = (ROOT / "deploy" / "Containerfile").read_text().replace("\\\n", "")


@pytest.mark.skipif(
    shutil.which("systemd-analyze") is None,
    reason="the unit is rated by systemd-analyze, which is not here (Debian: systemd)",
)
def test_systemd_rates_the_units_exposure_as_low(tmp_path: Path) -> None:
    unit = tmp_path / "netfold-switch.service"
    unit.write_text(UNIT)
    command = ["systemd-analyze", "security", "--no-pager", "--offline=yes", "--threshold=20", str(unit)]
    ended = load.run(command, 60)
    assert ended.returncode == 0, ended.stdout + ended.stderr  # an exposure of 2.0 of 10 at most


def test_the_unit_raises_the_bound_of_receive_buffers_and_never_lowers_it(tmp_path: Path) -> None:
    (line,) = re.findall(r"^ExecStartPre=\+-(.*)$", UNIT.replace("\\\n", ""), re.M)
    bound = tmp_path / "rmem_max"
    command = shlex.split(line.replace("$$", "$").replace("/proc/sys/net/core/rmem_max", str(bound)))
    for before, after in (("212992\n", "268435456\n"), ("536870912\n", "536870912\n")):
        bound.write_text(before)
        load.run(command, 10, check=True)
        assert bound.read_text() == after


def health_check() -> list[str]:
    """The command of the image, run by this Python."""
    (command,) = re.findall(r"^HEALTHCHECK .* CMD (\[.*\])$", CONTAINERFILE, re.M)
    binary, *arguments = json.loads(command)
    assert binary == "/opt/netfold/bin/netfold"
    return [sys.executable, "-m", "netfold.cli", *arguments]


def test_the_health_check_follows_the_switch_and_fails_once_it_is_killed() -> None:
    (variable, address) = re.findall(r"^ENV (NETFOLD_\w+)=(\S+)$", CONTAINERFILE, re.M)[0]
    control_messages.parse_endpoint(address, what=variable)
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    # The health check uses no proxy to reach its own host.
    environment = {**os.environ, variable: address, "http_proxy": "http://127.0.0.1:9"}

    def check() -> subprocess.CompletedProcess[str]:
        return load.run(health_check(), 30, env=environment)

    with tempfile.TemporaryFile("w+") as log:
        switch = subprocess.Popen(
            [sys.executable, "-m", "netfold.cli", "switch", "--listen", "127.0.0.1:0"],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        try:
            assert switch.stdout is not None
            assert switch.stdout.readline().startswith("netfold switch listening on ")
            healthy = check()
            assert healthy.returncode == 0 and healthy.stdout.startswith("serving for "), healthy
        finally:
            switch.kill()
            switch.wait()
            switch.stdout.close()
    gone = check()
    assert gone.returncode == 1
    assert f"nothing to read at http://{address}/status" in gone.stderr, gone
