"""`netfold switch`: run an aggregator."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from typing import Annotated

import typer


def switch(
    listen: Annotated[
        str, typer.Option(help="Address and port to listen on; port 0 takes a free one.")
    ] = "127.0.0.1:7171",
    open_to_all: Annotated[
        bool,
        typer.Option("--open", help="Serve a network address without authentication, on a trusted wire."),
    ] = False,
    max_jobs: Annotated[int, typer.Option(min=1, help="Jobs served at once.")] = 64,
    max_workers: Annotated[int, typer.Option(min=1, max=256, help="Workers a job may have.")] = 256,
    memory: Annotated[str, typer.Option(help="Memory for slots of all jobs, such as 512M or 2G.")] = "1G",
    window: Annotated[str, typer.Option(help="Bytes one worker may have in flight.")] = "1M",
    log: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
) -> None:
    """Run an aggregator: it adds up the gradients of the jobs that join it.

    Workers find it by NETFOLD_SWITCH=host:port. The address above is TCP, for membership; each job gets a UDP port of
    its own for data. SIGTERM or Ctrl-C stops it: workers are told, and the exit code is 0.
    """
    from netfold import control
    from netfold.bench.sizes import parse_size
    from netfold.switch import Limits, Switch

    level = getattr(logging, log.upper(), None)
    if not isinstance(level, int):
        raise typer.BadParameter(f"{log!r} is not a log level", param_hint="--log")
    logging.basicConfig(level=level, stream=sys.stderr, format="%(asctime)s %(levelname)-7s %(message)s")
    try:
        host, port = control.parse_endpoint(listen, what="--listen")
        limits = Limits(
            jobs=max_jobs,
            workers=max_workers,
            memory_bytes=parse_size(memory),
            window_bytes=parse_size(window),
        )
        daemon = Switch(host, port, limits=limits, open_to_all=open_to_all)
    except ValueError as error:
        typer.echo(f"netfold switch: {error}", err=True)
        raise typer.Exit(2) from None

    async def serve() -> None:
        stopped: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        def stop(number: signal.Signals) -> None:
            if not stopped.done():
                stopped.set_result(number.name)

        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop, number)
        bound_host, bound_port = await daemon.start()
        # One line on stdout, for who starts a switch from a program; all else is log, on stderr.
        print(f"netfold switch listening on {control.format_endpoint(bound_host, bound_port)}", flush=True)
        reason = await stopped
        await daemon.stop(reason)
        logging.getLogger("netfold.switch").info("stopped by %s", reason)

    try:
        asyncio.run(serve())
    except OSError as error:
        typer.echo(
            f"netfold switch: cannot listen on {listen}: {error.strerror or error}. Is another switch running there, "
            "or is the address not this machine's?",
            err=True,
        )
        raise typer.Exit(1) from None
