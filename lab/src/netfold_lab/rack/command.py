"""Run the system's network commands, and check that this machine has them."""

import os
import shutil
import subprocess
from collections.abc import Sequence

from netfold.extras import MissingExtraError, native_dev

# These commands wait only for the kernel; one that takes this long hangs.
COMMAND_TIMEOUT_S = 20

_PACKAGES = {"ip": "iproute2", "tc": "iproute2", "nft": "nftables", "ethtool": "ethtool"}


class RackError(RuntimeError):
    """The rack could not be built, used or removed; the text says where, and what to try."""


def why_unavailable(*, loss: bool, delay: bool = False) -> str | None:
    """Return a sentence on what this machine lacks for a rack; None where it lacks nothing."""
    if os.geteuid() != 0:
        return "a rack needs root to make network namespaces; try again with sudo"
    for tool in ("ip", "tc", *(("nft", "ethtool") if loss else ())):
        if shutil.which(tool) is None:
            return f"a rack needs the tool `{tool}`; try `apt-get install {_PACKAGES[tool]}`"
    if delay and not os.path.exists("/dev/net/tun"):
        return "a delay needs the kernel's TAP interfaces (/dev/net/tun, CONFIG_TUN); without them leave --delay out"
    if delay:
        try:
            native_dev("a link with delay")
        except MissingExtraError as error:
            return f"{error}; without it leave --delay out"
    return None


def run(argv: Sequence[str], stdin: str = "") -> str:
    """Run a command to its end and return its output. Raises RackError where it fails."""
    try:
        done = subprocess.run(argv, input=stdin, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise RackError(f"`{' '.join(argv)}` did not end within {COMMAND_TIMEOUT_S} s") from error
    if done.returncode != 0:
        complaint = done.stderr.strip() or f"exit code {done.returncode}"
        raise RackError(
            f"`{' '.join(argv)}` failed: {complaint}; a rack needs CAP_NET_ADMIN and CAP_SYS_ADMIN, and a "
            "kernel with veth, bridge, tbf and, for loss, nftables' netdev family"
        )
    return done.stdout
