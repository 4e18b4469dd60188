"""`netfold store`: a key-value store for the ranks of one job, which outlives them."""

from __future__ import annotations

import contextlib
import signal
from typing import Annotated

import typer

from netfold.cli.verb import exit_on


def store(
    listen: Annotated[
        str, typer.Option(help="Address and port to listen on; where the port is in use, one of the next seven.")
    ] = "127.0.0.1:29400",
) -> None:
    """Serve a store in which new ranks of an elastic job find its members. Ends by SIGTERM, SIGHUP or control-C.

    Start one for each run of a job, on a host that outlives the ranks, and set NETFOLD_STORE=HOST:PORT on every rank.
    It is plaintext and authenticates nobody, as torch's: listen on a trusted network, or set NETFOLD_SECRET_FILE.
    """
    from netfold.bootstrap.tcp_store import OUTLIVING, TcpStoreServer
    from netfold.errors import RendezvousError
    from netfold.switch_protocol.control_messages import format_endpoint, parse_endpoint

    ends = {signal.SIGTERM, signal.SIGINT}
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as nohup makes it
        ends.add(signal.SIGHUP)
    # Before the server's threads start, which inherit this.
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    with exit_on("store", ValueError, RendezvousError):
        host, port = parse_endpoint(listen, what="--listen")
        server = TcpStoreServer(host, port, OUTLIVING, variable="port with --listen")
    typer.echo(f"netfold store listening on {format_endpoint(host, server.port)}")
    with contextlib.closing(server):
        signal.sigwait(ends)
