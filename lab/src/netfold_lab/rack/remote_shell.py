"""A replacement of ssh between the hosts of a rack, for launchers that start ranks by a remote shell. Pure.

A launcher calls it as it calls ssh: options, a host's address, words for a shell there. Each host gets its own host
name, because Open MPI's launcher hangs where two hosts have one name. It also gets its own shared memory, which ends
with the last of its processes, and a temporary folder as from Rack.popen.
"""

import shlex

from netfold_lab.rack import names

# Runs in a UTS namespace, so that this machine keeps its host name; `ip netns exec` makes the mount namespace.
_ISOLATE = 'echo "$0" > /proc/sys/kernel/hostname && mount -t tmpfs netfold /dev/shm'


def remote_shell(rack_id: str, hosts: int) -> str:
    """Return the text of a program for sh."""
    cases = [
        f"{names.host_address(host)}) namespace={names.host_namespace(rack_id, host)} name=h{host} ;;"
        for host in range(hosts)
    ]
    inside = shlex.quote(f'{_ISOLATE} && mount -t tmpfs netfold "$TMPDIR" && eval "$1"')
    lines = [
        "#!/bin/sh",
        'while [ "${1#-}" != "$1" ]; do shift; done',
        'case "$1" in',
        *cases,
        '*) echo "no host of this rack has the address $1" >&2; exit 1 ;;',
        "esac",
        "shift",
        f'exec ip netns exec "$namespace" unshare --uts sh -c {inside} "$name" "$*"',
    ]
    return "\n".join(lines) + "\n"


def named(host: int, argv: list[str]) -> list[str]:
    """Return the command that runs `argv` under the host's name, for the launcher itself."""
    return ["unshare", "--uts", "sh", "-c", f'{_ISOLATE} && exec "$@"', f"h{host}", *argv]
