"""What stands for ssh between the hosts of a rack, for launchers that start ranks by a remote shell. Pure.

A launcher calls it as it would ssh: options, a host's address, words for a shell there. Each host gets a name of its
own (Open MPI's launcher waits for ever where two hosts have one name), shared memory of its own, which is gone with the
last of its processes, however they end, and, as from Rack.popen, a temporary folder.
"""

import shlex

from netfold.rack import names

# In a namespace of names, so that this machine keeps its own; of mounts `ip netns exec` has made one.
_ALONE = 'echo "$0" > /proc/sys/kernel/hostname && mount -t tmpfs netfold /dev/shm'


def remote_shell(rack_id: str, hosts: int) -> str:
    """The text of a program for sh."""
    places = [
        f"{names.host_address(host)}) namespace={names.host_namespace(rack_id, host)} name=h{host} ;;"
        for host in range(hosts)
    ]
    inside = shlex.quote(f'{_ALONE} && mount -t tmpfs netfold "$TMPDIR" && eval "$1"')
    lines = [
        "#!/bin/sh",
        'while [ "${1#-}" != "$1" ]; do shift; done',
        'case "$1" in',
        *places,
        '*) echo "no host of this rack has the address $1" >&2; exit 1 ;;',
        "esac",
        "shift",
        f'exec ip netns exec "$namespace" unshare --uts sh -c {inside} "$name" "$*"',
    ]
    return "\n".join(lines) + "\n"


def named(host: int, argv: list[str]) -> list[str]:
    """`argv` under the host's name, for the launcher itself."""
    return ["unshare", "--uts", "sh", "-c", f'{_ALONE} && exec "$@"', f"h{host}", *argv]
