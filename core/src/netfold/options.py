"""The options of a group, and their environment variables."""

from __future__ import annotations

import difflib
import logging
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from netfold.switch_protocol.control_messages import switches_of

log = logging.getLogger("netfold")

TRANSPORTS = ("auto", "tcp")
INTRA_HOST = ("auto", "nccl", "off")
# In order of strength. The handshake sends the index.
SECURITIES = ("none", "authenticate", "encrypt")


# A longer timeout counts as this one of 23 days: poll takes no more than 2^31 ms.
MOST_TIMEOUT_S = 2e6


def timeout_seconds(timeout_s: float | None, default_s: float = MOST_TIMEOUT_S) -> float:
    """A caller's timeout, as every wait of the package takes it: from 0 to MOST_TIMEOUT_S.

    None: the default. Negative: 0, and so a timeout that has passed. Inf: MOST_TIMEOUT_S. ValueError for NaN.
    """
    if timeout_s is None:
        return default_s
    if math.isnan(timeout_s):
        raise ValueError("the timeout is not a number (NaN); give seconds, or None for the default")
    return min(max(0.0, timeout_s), MOST_TIMEOUT_S)


@dataclass(frozen=True)
class Options:
    """Options of a group. A field that is None takes its environment variable NETFOLD_<NAME>, else its default."""

    switch: str | None = None
    """The aggregator as host:port, or host:port#fingerprint where it wants a token. Ranks may have different switches
    of one tree. A group uses several, separated by commas, side by side. Default: no switch, host algorithms.
    "": no switch, whatever the variable says."""
    token_file: str | None = None
    """A file with the token that the switch wants, readable by this user only."""
    security: str | None = None
    """none, authenticate or encrypt: the least protection of streams between ranks, and of packets to a switch
    (docs/explanation/security.md). All ranks need the same."""
    secret_file: str | None = None
    """A file with a secret that all ranks of a job share, readable by this user only. Without one, the only secret is
    the one that rank 0 puts in the store, and everybody who can read the store knows it."""
    job_name: str | None = None
    """The job's name in the switch's metrics and log: up to 64 letters, digits and _.:/+-."""
    algorithm: str | None = None
    """auto; an algorithm, for every operation that it can do; or operation=algorithm pairs, separated by commas
    (docs/explanation/algorithms.md)."""
    wire_dtype: str | None = None
    """auto, f32, bf16, f16, i32 or i8: the number format in which all_reduce sends f32 tensors
    (docs/explanation/numbers.md). auto never loses a bit. A sum by i32 has the same bits with every algorithm. i8 is
    for gradients."""
    transport: str | None = None
    """auto; tcp: ranks of one machine do not use shared memory; fabric:PROVIDER: use this provider of libfabric instead
    of TCP, and of UDP to a switch (docs/how-to/fabric.md). With fabric:PROVIDER,memory ranks of one machine
    use shared memory."""
    single_copy: str | None = None
    """on or off: ranks of one machine read from each other's memory, where the kernel lets them. off on any rank is off
    for its machine."""
    share_buckets: str | None = None
    """on or off: move DDP's buckets to shared memory, in place, where all ranks are on one machine."""
    interface: str | None = None
    """Names or addresses of interfaces, separated by commas. Over several, every transfer is striped: the k-th of one
    rank connects to the k-th of another. Default: the one that routes to the rendezvous host, else the first that
    reaches the other rank."""
    ports: str | None = None
    """The port, or first-last, to listen on, for firewalls; every process of a host needs one. Default: any."""
    window_bytes: int | None = None
    """Bytes in flight to the switch, within what the switch grants."""
    reconnect_s: int | None = None
    """Seconds within which a broken connection between hosts may be made again. 0: never, and no sent data is kept."""
    rejoin_s: int | None = None
    """Seconds after which a lost switch is asked to take the group again. The wait doubles with each try and each loss,
    up to sixteen times this, until the switch has stayed for that long. 0: never. Rank 0's is the group's."""
    probe: str | None = None
    """on or off: whether a new group measures its links. off: built-in figures, and the same choice of algorithms in
    every run."""
    intra_host: str | None = None
    """Sums of GPU tensors among the ranks of a host, before data leaves it. auto: through each other's GPU memory
    where all can; nccl; off: not at all, each rank goes through host memory."""
    pinned_bytes: int | None = None
    """Pinned host memory of a group for collectives on GPU memory. 0: 12 MB for up to 8 ranks, then in proportion to
    the ranks, up to 96 MB."""
    rma_min_bytes: int | None = None
    """Chunks from this size on are written directly to the other rank's memory, over a fabric that can do so
    (docs/how-to/fabric.md). 0: none."""
    registration_cache_entries: int | None = None
    """The number of memory ranges that a process keeps registered with a fabric. 0: none beyond an operation."""
    registration_cache_bytes: int | None = None
    """The number of bytes that a process keeps registered with a fabric. 0: none beyond an operation."""
    spin_us: int | None = None
    """Microseconds of polling before a waiting thread sleeps. Default for shared memory: 200 where the ranks of a
    machine have a core each, else 1000, yielding; for sockets 0."""

    def resolved(self, environment: Mapping[str, str] = os.environ) -> Options:
        """Fill in the environment and the defaults. ValueError names the variable whose value is invalid."""
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
        transport = options.transport or ""
        if transport not in TRANSPORTS and not re.fullmatch(r"fabric:[^,\s]+(,memory)?", transport):
            raise ValueError(
                f"NETFOLD_TRANSPORT={transport!r} is not one of {', '.join(TRANSPORTS)}, fabric:PROVIDER, "
                "fabric:PROVIDER,memory"
            )
        for name, allowed in _ALLOWED.items():
            if getattr(options, name) not in allowed:
                raise ValueError(
                    f"NETFOLD_{name.upper()}={getattr(options, name)!r} is not one of {', '.join(allowed)}"
                )
        options.port_range()
        if options.job_name is not None and not re.fullmatch(r"[\w.:/+-]{1,64}", options.job_name, re.ASCII):
            raise ValueError(
                f"NETFOLD_JOB_NAME={options.job_name!r} is no name for a job: up to 64 letters, digits and _.:/+-"
            )
        if options.switch == "":
            options = replace(options, switch=None)
        switches_of(options.switch)
        return options

    def with_hints(self, hints: Mapping[str, str]) -> Options:
        """Replace the options that `hints` names by their variables, such as NETFOLD_WIRE_DTYPE. Others are ignored.

        For resolved options. ValueError for a key that begins with NETFOLD_ and is no option, and for an invalid value.
        """
        ours = {name for name in hints if name.startswith("NETFOLD_")}
        named = {f"NETFOLD_{field.name.upper()}": field.name for field in fields(self)}
        if unknown := sorted(ours - named.keys()):
            raise ValueError(f"the hint {unknown[0]} is no option of a group; see netfold.Options")
        return replace(self, **{named[name]: None for name in ours}).resolved(hints) if ours else self

    @property
    def fabric(self) -> str | None:
        """The provider of libfabric to use instead of TCP, and of UDP to a switch; None for TCP and UDP."""
        head, _, provider = (self.transport or "").partition(":")
        return provider.removesuffix(",memory") if head == "fabric" else None

    @property
    def shares_memory(self) -> bool:
        """Whether ranks of one machine use shared memory."""
        return self.transport == "auto" or (self.transport or "").endswith(",memory")

    def port_range(self) -> range:
        """The ports to listen on; range(1), for any, where none is named. ValueError for a malformed range."""
        if self.ports is None:
            return range(1)
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", self.ports)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 0 < first <= last < 65536:
            raise ValueError(f"NETFOLD_PORTS={self.ports!r} is no port and no range of ports, such as 29600-29607")
        return range(first, last + 1)


_ALLOWED = {
    "security": SECURITIES,
    "intra_host": INTRA_HOST,
    "single_copy": ("on", "off"),
    "share_buckets": ("on", "off"),
    "probe": ("on", "off"),
}
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
    "pinned_bytes": 0,
    "rma_min_bytes": 64 << 10,
    "registration_cache_entries": 1024,
    "registration_cache_bytes": 4 << 30,
    "spin_us": None,
}


# Variables that are no option of a group (docs/reference/environment.md).
_OTHER_VARIABLES = (
    "NETFOLD_ISA",
    "NETFOLD_JOIN_TIMEOUT_S",
    "NETFOLD_LOG",
    "NETFOLD_NCCL_CUDA",
    "NETFOLD_NCCL_REQUIRE_SWITCH",
    "NETFOLD_NCCL_STREAMS",
    "NETFOLD_NCCL_TUNER",
    "NETFOLD_PROFILE",
    "NETFOLD_STORE",
    "NETFOLD_SWITCH_METRICS",
    "NETFOLD_SWITCH_OPTIONS",
)


def known_variables() -> list[str]:
    """All environment variables that netfold reads."""
    return sorted([*_OTHER_VARIABLES, *(f"NETFOLD_{field.name.upper()}" for field in fields(Options))])


def unknown_variables(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables with netfold's prefix that it does not read, and the nearest name that it does; "" for none."""
    known = known_variables()
    unknown = sorted(name for name in environment if name.startswith("NETFOLD_") and name not in known)
    # Without the prefix, which would make all names alike.
    ends = [name.removeprefix("NETFOLD_") for name in known]
    near = {name: difflib.get_close_matches(name.removeprefix("NETFOLD_"), ends, 1) for name in unknown}
    return {name: f"NETFOLD_{close[0]}" if close else "" for name, close in near.items()}


_warned = False


def warn_of_unknown_variables(environment: Mapping[str, str] = os.environ) -> None:
    """Log one warning a process where unknown variables are set: most are a known one with a slip."""
    global _warned
    unknown = {} if _warned else unknown_variables(environment)
    _warned = True
    if unknown:
        texts = [f"{name} (did you mean {near}?)" if near else name for name, near in unknown.items()]
        log.warning("netfold does not know these environment variables, and ignores them: %s", ", ".join(texts))


def _number(variable: str, text: str) -> int:
    if not text.isdigit():
        raise ValueError(f"{variable}={text!r} is not a whole number")
    return int(text)
