"""Everything a user can set, with the environment variable of the same name."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from netfold.switch_protocol.control_messages import switches_of


@dataclass(frozen=True)
class Options:
    """Options of a group. A field that is None takes its environment variable, else its default.

    switch: the aggregator as host:port, or host:port#fingerprint where it wants a token (NETFOLD_SWITCH); ranks
        may have different ones that are in one tree; several with commas between are gone over side by side; none:
        host algorithms; "": none, whatever the variable says.
    token_file: a file with the token that the switch wants, for this user's eyes only (NETFOLD_TOKEN_FILE).
    security: none, authenticate or encrypt: the least that streams between ranks, and packets to a switch, have
        (NETFOLD_SECURITY, docs/explanation/security.md); all ranks need the same.
    secret_file: a file with a secret that all ranks of a job share, for this user's eyes only (NETFOLD_SECRET_FILE);
        none: the secret that rank 0 leaves in the store is all, and whoever can read the store knows it.
    job_name: what the switch's metrics and log call this job (NETFOLD_JOB_NAME); letters, digits and _.:/+-, up to 64.
    algorithm: auto, the name of an algorithm for every operation that it can do, or operation=algorithm pairs by commas
        (NETFOLD_ALGORITHM; docs/explanation/algorithms.md).
    wire_dtype: auto, f32, bf16, f16, i32 or i8: what f32 tensors travel as in all_reduce (NETFOLD_WIRE_DTYPE,
    docs/explanation/numbers.md);
        auto never loses a bit, the bits of a sum by i32 are the same whatever runs it, i8 is for gradients.
    transport: auto; tcp to keep ranks that share memory from using it; fabric:PROVIDER to go over a provider of
        libfabric instead of tcp, and of UDP to a switch, fabric:PROVIDER,memory where ranks that share memory should
        use it (NETFOLD_TRANSPORT, docs/how-to/fabric.md); mpi or mpi,memory: the same between ranks over the MPI of
        mpirun
        (docs/how-to/mpi.md).
    single_copy: on or off: ranks of one machine read what is sent straight from each other's memory, where the kernel
        lets them (NETFOLD_SINGLE_COPY); off on any rank is off for its machine.
    share_buckets: on or off: move DDP's buckets to shared memory, in place, where all ranks are on one machine
        (NETFOLD_SHARE_BUCKETS).
    interface: names or addresses of the interfaces to use, by commas (NETFOLD_INTERFACE); over several every transfer
        goes in stripes, the k-th of one rank with the k-th of another. Default: whichever reaches the other rank, the
        one that routes to the rendezvous host first.
    ports: the port, or first-last, to listen on (NETFOLD_PORTS), for firewalls; default: any. Every process of a host
        needs one.
    reconnect_s: seconds within which a connection between hosts that broke may come back (NETFOLD_RECONNECT_S); 0: it
        is not tried, and nothing is kept for it.
    rejoin_s: seconds after which a switch that was lost is asked to have the group again (NETFOLD_REJOIN_S), twice as
        long after each time in vain, up to sixteen times; 0: never. Rank 0's is the group's.
    window_bytes: bytes in flight to the switch (NETFOLD_WINDOW_BYTES), within what it grants.
    probe: on or off: whether a new group measures its links (NETFOLD_PROBE); off: built-in figures, and the
        same choice of algorithms in every run.
    intra_host: what adds up tensors in GPUs among the ranks of a host, before anything leaves it (NETFOLD_INTRA_HOST):
    auto, by
        reaching each other's memory where all can; nccl; off: nothing, each rank goes through the host's memory.
    pinned_bytes: pinned host memory for collectives on GPUs' memory, a group (NETFOLD_PINNED_BYTES).
    rma_min_bytes: pieces from this size on are written straight to the other rank's memory, over a fabric that can
        (NETFOLD_RMA_MIN_BYTES, docs/how-to/fabric.md); 0: none.
    registration_cache_entries, registration_cache_bytes: how many ranges of memory, and bytes in them, a process keeps
    registered with a
        fabric at most (NETFOLD_REGISTRATION_CACHE_ENTRIES, NETFOLD_REGISTRATION_CACHE_BYTES); 0: none beyond an
        operation.
    spin_us: microseconds of polling before a waiting thread sleeps (NETFOLD_SPIN_US); default: for memory 200 where the
        ranks of a machine have a core each, 1000, yielding, where they have not; for sockets 0.
    """

    switch: str | None = None
    token_file: str | None = None
    security: str | None = None
    secret_file: str | None = None
    job_name: str | None = None
    algorithm: str | None = None
    wire_dtype: str | None = None
    transport: str | None = None
    single_copy: str | None = None
    share_buckets: str | None = None
    interface: str | None = None
    ports: str | None = None
    window_bytes: int | None = None
    reconnect_s: int | None = None
    rejoin_s: int | None = None
    probe: str | None = None
    intra_host: str | None = None
    pinned_bytes: int | None = None
    rma_min_bytes: int | None = None
    registration_cache_entries: int | None = None
    registration_cache_bytes: int | None = None
    spin_us: int | None = None

    def resolved(self, environment: Mapping[str, str] = os.environ) -> Options:
        """With the environment and the defaults filled in; ValueError names the variable that makes no sense."""
        values: dict[str, object] = {}
        for field in fields(self):
            if getattr(self, field.name) is not None:
                continue
            variable = f"NETFOLD_{field.name.upper()}"
            text = environment.get(variable, "").strip()
            if field.name in _DEFAULT_NUMBERS:
                values[field.name] = _number(variable, text) if text else _DEFAULT_NUMBERS[field.name]
            else:
                values[field.name] = text or _DEFAULT_WORDS.get(field.name)
        options = replace(self, **values)  # type: ignore[arg-type]
        if options.transport not in TRANSPORTS and not re.fullmatch(
            r"(fabric:[^,\s]+|mpi)(,memory)?", options.transport or ""
        ):
            raise ValueError(
                f"NETFOLD_TRANSPORT={options.transport!r} is not one of {', '.join(TRANSPORTS)}, fabric:PROVIDER, "
                "fabric:PROVIDER,memory, mpi, mpi,memory"
            )
        if options.security not in SECURITIES:
            raise ValueError(f"NETFOLD_SECURITY={options.security!r} is not one of {', '.join(SECURITIES)}")
        if options.intra_host not in INTRA_HOST:
            raise ValueError(f"NETFOLD_INTRA_HOST={options.intra_host!r} is not one of {', '.join(INTRA_HOST)}")
        for name in ("single_copy", "share_buckets", "probe"):
            if getattr(options, name) not in ("on", "off"):
                raise ValueError(f"NETFOLD_{name.upper()}={getattr(options, name)!r} is not one of on, off")
        options.port_range()
        if options.job_name is not None and not re.fullmatch(r"[\w.:/+-]{1,64}", options.job_name, re.ASCII):
            raise ValueError(
                f"NETFOLD_JOB_NAME={options.job_name!r} is no name for a job: up to 64 letters, digits and _.:/+-"
            )
        if options.switch == "":
            options = replace(options, switch=None)
        switches_of(options.switch)
        return options

    @property
    def fabric(self) -> str | None:
        """The provider of libfabric to go over, if any; mpi for MPI."""
        if self.over_mpi:
            return "mpi"
        head, _, provider = (self.transport or "").partition(":")
        return provider.removesuffix(",memory") if head == "fabric" else None

    @property
    def switch_fabric(self) -> str | None:
        """The provider of libfabric over which packets go to a switch, which is in no MPI; None: by UDP."""
        return None if self.over_mpi else self.fabric

    @property
    def over_mpi(self) -> bool:
        """Whether to go over MPI in the place of libfabric."""
        return self.transport in ("mpi", "mpi,memory")

    @property
    def shares_memory(self) -> bool:
        """Whether ranks of one machine are to go through its memory."""
        return self.transport == "auto" or (self.transport or "").endswith(",memory")

    def port_range(self) -> range:
        """The ports to listen on; range(1), for any, where none are named. ValueError for what is no range."""
        if self.ports is None:
            return range(1)
        found = re.fullmatch(r"(\d+)(?:-(\d+))?", self.ports)
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
        if not 0 < first <= last < 65536:
            raise ValueError(f"NETFOLD_PORTS={self.ports!r} is no port and no range of ports, such as 29600-29607")
        return range(first, last + 1)


TRANSPORTS = ("auto", "tcp")
INTRA_HOST = ("auto", "nccl", "off")
# In the order of strength; the place of each is what the handshake says.
SECURITIES = ("none", "authenticate", "encrypt")
_DEFAULT_WORDS = {
    "algorithm": "auto",
    "security": "none",
    "wire_dtype": "auto",
    "transport": "auto",
    "single_copy": "on",
    "share_buckets": "on",
    "probe": "on",
    "intra_host": "auto",
}
_DEFAULT_NUMBERS = {
    "window_bytes": 1 << 20,
    "reconnect_s": 10,
    "rejoin_s": 5,
    "pinned_bytes": 12 << 20,
    "rma_min_bytes": 64 << 10,
    "registration_cache_entries": 1024,
    "registration_cache_bytes": 4 << 30,
    "spin_us": None,
}


def _number(variable: str, text: str) -> int:
    if not text.isdigit():
        raise ValueError(f"{variable}={text!r} is not a whole number")
    return int(text)
