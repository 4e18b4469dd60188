"""`netfold explain`: which algorithm would run, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from netfold.cli.output import Output, with_output
from netfold.cli.verb import exit_on, rate_option, time_option

if TYPE_CHECKING:
    from rich.console import Console

    from netfold.communicator import Options

# The timeout of a query to a switch.
_SWITCH_S = 1.0


@with_output("json")
def explain(
    operation: Annotated[str, typer.Argument(help="all-reduce, broadcast, all-gather, ...")],
    output: Output,
    size: Annotated[str, typer.Option(help="Bytes of the whole tensor, such as 4, 64K, 16M.")] = "16M",
    ranks: Annotated[int, typer.Option(min=1, help="Ranks in the group.")] = 4,
    hosts: Annotated[int | None, typer.Option(min=1, help="Hosts of the ranks; default: one for each rank.")] = None,
    latency: float | None = time_option(None, least_s=1e-7, help="Latency of a message between hosts: 20us."),
    rate: float | None = rate_option(None, help="Rate of a tensor's bits between hosts: 9.4gbit."),
    gpu: Annotated[
        bool, typer.Option("--gpu", help="Also test the paths of GPU tensors here, with two ranks.")
    ] = False,
) -> None:
    """Print the algorithms for an operation with their predicted times, the one that would run, and the reason.

    Uses the present environment. A running group measures its links first (`netfold.torch.why`, `Group.why`). The size
    is that of the tensor to reduce or broadcast, of the result of all-gather, of a rank's input to reduce-scatter and
    all-to-all.
    """
    from dataclasses import asdict, replace

    from rich.table import Table

    from netfold import units
    from netfold.bootstrap.fabric import preview_transport
    from netfold.bootstrap.security import why_no_switch, why_not_secure
    from netfold.communicator import Options
    from netfold.quantity import parse_size
    from netfold.tuning import DEFAULT_LINKS, Link, Topology, build_table, candidates

    name = operation.replace("-", "_")
    host_count = hosts or ranks
    with exit_on("explain", ValueError, KeyError):
        options = Options().resolved()
        topology = Topology.even(ranks, host_count)
        apart = not options.shares_memory and topology.node_count < ranks
        if apart:
            topology = Topology.apart(ranks)
        network = DEFAULT_LINKS.network
        links = replace(DEFAULT_LINKS, network=Link(latency or network.latency_s, rate or network.bytes_per_s))
        size_bytes = parse_size(size)
        no_switch = why_not_secure(options) or why_no_switch(str(options.security), options.switch)
        switch = None if no_switch else options.switch
        table = build_table(
            ranks=ranks,
            switch=switch,
            algorithm=str(options.algorithm),
            wire=str(options.wire_dtype),
            topology=topology,
            links=links,
            example_bytes=size_bytes,
        )
        row = table.choose(name, size_bytes)
        about_switch = no_switch if switch is None else _protection(switch, str(options.security))
    sentences = [f"* {row.algorithm}, wire {row.wire}: {row.reason}"]
    if apart:
        sentences.append(f"ranks of one host do not share memory: NETFOLD_TRANSPORT={options.transport}")
    over, why_not = preview_transport(options)
    if over or why_not:
        sentences.append(f"over {over}" if over else f"no group can form: {why_not}")
    if switch is not None and options.fabric is None:
        sentences += _windows(options, host_count)
    if about_switch:
        sentences.append(about_switch)
    if gpu:
        from netfold.torch.device.selftest import run_selftest

        sentences += run_selftest()[0]
    found = candidates(name, size_bytes, topology, links, switch=switch, wire=row.wire) if ranks > 1 else []

    def show(console: Console) -> None:
        if found:
            where = units.plural(ranks, "rank") + ("" if hosts is None else f" on {units.plural(hosts, 'host')}")
            table = Table(title=f"{name} of {size} on {where}: {row.algorithm}", title_justify="left")
            table.add_column("algorithm")
            table.add_column("predicted", justify="right")
            table.add_column("")
            for each in found:
                chosen = each.algorithm == row.algorithm
                time = "-" if each.seconds is None else units.seconds(each.seconds)
                style = "bold" if chosen else None
                table.add_row(each.algorithm + (" *" if chosen else ""), time, each.note, style=style)
            console.print(table)
        console.print("\n".join(sentences), soft_wrap=True, highlight=False)

    output.show(
        show,
        json=lambda: {
            "operation": name,
            "size_bytes": size_bytes,
            "ranks": ranks,
            "hosts": host_count,
            "algorithm": row.algorithm,
            "wire": row.wire,
            "reason": row.reason,
            "candidates": [asdict(each) for each in found],
            "notes": sentences[1:],
        },
    )


def _windows(options: Options, workers: int) -> list[str]:
    """Query each switch over TCP. Returns a sentence for each: the window of `workers`, or that it is unknown."""
    from netfold._native import protocol
    from netfold.errors import NetfoldError
    from netfold.switch_protocol.control_client import query_quota
    from netfold.switch_protocol.control_messages import switches_of
    from netfold.switch_protocol.data_path import window_chunks

    sentences = []
    payload_bytes = protocol.ETHERNET_PAYLOAD_BYTES
    for endpoint in switches_of(options.switch):
        where = endpoint.partition("#")[0]
        try:
            buffer = query_quota(endpoint, token_file=options.token_file, rank=0, timeout_s=_SWITCH_S).buffer
        except (NetfoldError, ValueError):
            sentences.append(f"the switch at {where} did not answer a query for its window from this host")
            continue
        if buffer.window_bytes:
            chunks = window_chunks(buffer.held_bytes(workers), payload_bytes)
            whole = f"{workers} workers have a window of {chunks} packets of {payload_bytes} bytes each"
            sentences.append(f"the switch at {where}: {buffer.window_shortfall(workers) or whole}")
    return sentences


def _protection(switch: str, security: str) -> str:
    """Describe the protection of packets between worker and switch. ValueError for an invalid address."""
    from netfold.switch_protocol import control_messages

    if control_messages.parse_switch(switch, what="NETFOLD_SWITCH").fingerprint is None:
        return "packets to and from the switch are not authenticated: NETFOLD_SWITCH names no fingerprint"
    if security == "encrypt":
        return "packets to and from the switch are encrypted (AES-GCM, 16 bytes more each)"
    return "packets to and from the switch are authenticated (AES-GMAC, 16 bytes each)"
