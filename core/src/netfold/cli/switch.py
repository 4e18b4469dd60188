"""`netfold switch`: run an aggregator, or print the status of one."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
from collections.abc import Awaitable
from pathlib import Path
from typing import Annotated

import typer

from netfold.cli.output import STDOUT_TABLE, Output, with_output
from netfold.cli.verb import CANNOT, FAILED, exit_on, new_app, time_option

app = new_app(help="Run an aggregator: it adds up the gradients of the jobs that join it.")

STDERR = 2  # the descriptor
CONTROL_NICE = 10
# An environment variable, so that a container's health check uses the same port as its switch.
METRICS = "NETFOLD_SWITCH_METRICS"


@app.callback(invoke_without_command=True)
def switch(
    context: typer.Context,
    listen: Annotated[
        str, typer.Option(help="Address and port to listen on; port 0 takes a free one.")
    ] = "127.0.0.1:7171",
    open_to_all: Annotated[
        bool,
        typer.Option("--open", help="Serve a network address without TLS and tokens, on a trusted network."),
    ] = False,
    token_file: Annotated[
        Path | None, typer.Option(help="Lines of `tenant token`, readable by you alone; turns TLS on.")
    ] = None,
    state_dir: Annotated[
        Path | None,
        typer.Option(help="Folder for the certificate, made if missing; without it each start has a new fingerprint."),
    ] = None,
    parent: Annotated[
        str | None,
        typer.Option(
            help="The parent switch, host:port or host:port#fingerprint. It receives the sums of jobs that also have "
            "workers outside this switch."
        ),
    ] = None,
    parent_token_file: Annotated[
        Path | None, typer.Option(help="A file that holds only this switch's token for its parent.")
    ] = None,
    max_jobs: Annotated[int, typer.Option(min=1, help="Jobs served at once.")] = 64,
    max_workers: Annotated[
        int, typer.Option(min=1, max=256, help="Workers and switches of a job that may join here.")
    ] = 256,
    memory: Annotated[str, typer.Option(help="Memory for slots of all jobs, such as 512M or 2G.")] = "1G",
    window: Annotated[str, typer.Option(help="Bytes one worker may have in flight.")] = "1M",
    threads: Annotated[
        int,
        typer.Option(
            min=1,
            max=64,
            help="Threads that handle packets. Each job belongs to one thread. A group that names this switch twice "
            "in NETFOLD_SWITCH uses two threads.",
        ),
    ] = 1,
    cores: Annotated[
        str | None,
        typer.Option(help="Cores such as 2,3: one thread is pinned to each, with its jobs' memory on the same node."),
    ] = None,
    busy_poll: float = time_option(
        "0us",
        most_s=1.0,
        help="How long a thread polls after its last packet before it sleeps: faster answers, but the core is never "
        "idle while a job runs.",
    ),
    fabric: Annotated[
        list[str] | None,
        typer.Option(
            help="A provider of libfabric, as in NETFOLD_TRANSPORT=fabric:PROVIDER, that workers may use beside UDP; "
            "repeat it for several."
        ),
    ] = None,
    dataplane: Annotated[
        str,
        typer.Option(
            help="user: threads of this process. bmv2: a P4 pipeline, core/native/p4/netfold.p4 in bmv2's "
            "simple_switch; needs --pipeline and --hosts."
        ),
    ] = "user",
    pipeline: Annotated[str | None, typer.Option(help="The Thrift server of the simple_switch, host:port.")] = None,
    hosts: Annotated[
        Path | None,
        typer.Option(help="A JSON file: by the IPv4 address of each host its mac and its port of the pipeline."),
    ] = None,
    metrics: Annotated[
        str | None,
        typer.Option(
            envvar=METRICS,
            help="Address and port for /metrics, /healthz and /status: plain HTTP, without access control.",
        ),
    ] = None,
    drain: float = time_option("30s", help="How long running jobs may take to end after SIGTERM."),
    log: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
) -> None:
    """Run an aggregator: it adds up the gradients of the jobs that join it.

    Set NETFOLD_SWITCH of the workers to the address that this command prints. That address is TCP, for membership.
    Each job gets its own UDP port for data, or an endpoint on its --fabric. SIGTERM and SIGHUP drain the switch: it
    admits no new job, and running jobs may take --drain to end. Ctrl-C or a further SIGTERM stops the switch at once.
    The switch notifies the remaining workers, and the exit code is 0.
    """
    if context.invoked_subcommand is not None:
        return
    from netfold.options import warn_of_unknown_variables
    from netfold.quantity import parse_size
    from netfold.switch import Limits, Switch, Tokens
    from netfold.switch.acceptor import bound_memory
    from netfold.switch.bmv2 import Bmv2
    from netfold.switch.http import HttpServer
    from netfold.switch.log import LogfmtFormatter, QueuedHandler, RateLimit, event
    from netfold.switch.parent import Parent
    from netfold.switch_protocol import control_messages

    level = getattr(logging, log.upper(), None)
    if not isinstance(level, int):
        raise typer.BadParameter(f"{log!r} is not a log level", param_hint="--log")
    output = QueuedHandler(STDERR)
    output.setFormatter(LogfmtFormatter())
    output.addFilter(RateLimit())
    logging.basicConfig(level=level, handlers=[output])
    bound_memory()
    warn_of_unknown_variables()
    with exit_on("switch", ValueError, OSError):
        host, port = control_messages.parse_endpoint(listen, what="--listen")
        limits = Limits(
            jobs=max_jobs,
            workers=max_workers,
            memory_bytes=parse_size(memory),
            window_bytes=parse_size(window),
        )
        pinned = _parse_cores(cores)
        if pinned and threads not in (1, len(pinned)):
            raise ValueError(f"--threads {threads} and --cores {cores}: each core has one thread; leave out --threads")
        if dataplane not in ("user", "bmv2"):
            raise ValueError(f"--dataplane {dataplane!r} is not user or bmv2")
        if (dataplane == "bmv2") != (pipeline is not None) or (pipeline is None) != (hosts is None):
            raise ValueError("--dataplane bmv2 needs --pipeline and --hosts, and no other data plane has them")
        tokens = None if token_file is None else Tokens.read(token_file)
        if parent is None and parent_token_file is not None:
            raise ValueError("--parent-token-file needs --parent")
        above = None if parent is None else Parent(parent, parent_token_file)
        # The pipeline's lease has the switch's incarnation, so it comes first.
        below = (
            None
            if pipeline is None or hosts is None
            else Bmv2.open(pipeline, hosts, incarnation=secrets.randbelow((1 << 32) - 1) + 1)
        )
        daemon = Switch(
            host,
            port,
            limits=limits,
            open_to_all=open_to_all,
            tokens=tokens,
            state_dir=state_dir,
            parent=above,
            threads=len(pinned) or threads,
            cores=pinned,
            busy_poll_s=busy_poll,
            fabrics=fabric or (),
            pipeline=below,
        )
        web = (
            None
            if metrics is None
            else HttpServer(*control_messages.parse_endpoint(metrics, what="--metrics"), daemon.status)
        )

    async def serve() -> None:
        stopping = asyncio.Event()
        at_once = asyncio.Event()
        signals: list[signal.Signals] = []

        def stop(number: signal.Signals) -> None:
            signals.append(number)
            stopping.set()
            # A terminal that closes may send SIGHUP twice: the kernel does, and the shell.
            if number == signal.SIGINT or (number == signal.SIGTERM and len(signals) > 1):
                at_once.set()

        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) == signal.SIG_IGN:  # as nohup does with SIGHUP
                continue
            asyncio.get_running_loop().add_signal_handler(number, stop, number)
        if web is not None:
            address = await bind(web.start(), metrics or "")
            event(logging.INFO, "metrics", f"metrics at http://{address}/metrics", address=address)
        endpoint = await bind(daemon.start(), listen)
        # This is for the Python thread alone. The threads of packets run already, and go before what peers send to it.
        os.setpriority(os.PRIO_PROCESS, 0, CONTROL_NICE)
        # The only line on stdout, for programs that start a switch. The log is on stderr, which may be the same pipe:
        # `print` would write the line's end by itself.
        typer.echo(f"netfold switch listening on {endpoint}")
        try:
            await daemon.check_parent()
        except ValueError as error:
            typer.echo(f"netfold switch: {error}", err=True)
            await daemon.stop("its parent is below it")
            raise typer.Exit(CANNOT) from None
        await stopping.wait()
        reason = signals[0].name
        drained = asyncio.ensure_future(daemon.drain(reason, drain))
        hurried = asyncio.ensure_future(at_once.wait())
        await asyncio.wait([drained, hurried], return_when=asyncio.FIRST_COMPLETED)
        for each in (drained, hurried):
            each.cancel()
        await daemon.stop(reason)
        if web is not None:
            await web.stop()
        event(logging.INFO, "stopped", f"stopped by {reason}", signal=reason)

    async def bind(starting: Awaitable[str], where: str) -> str:
        try:
            return await starting
        except OSError as error:
            typer.echo(
                f"netfold switch: cannot listen on {where}: {error.strerror or error}. Is another switch running "
                "there, or is the address not this machine's?",
                err=True,
            )
            raise typer.Exit(FAILED) from None

    try:
        asyncio.run(serve())
    finally:
        output.close()


@app.command()
@with_output("json")
def status(
    endpoint: Annotated[str, typer.Argument(envvar=METRICS, help="host:port of the switch's --metrics.")],
    output: Output,
    once: Annotated[bool, typer.Option("--once", help="Print the status once; so do --output json and -o.")] = False,
    interval: float = time_option("1s", least_s=0.1, help="Time between two queries."),
) -> None:
    """Show a switch's jobs, their traffic, and which rank is late, until Ctrl-C.

    The exit code is 1 if the switch does not answer.
    """
    import time

    from rich.live import Live

    from netfold.console import plain_console
    from netfold.switch.status_table import fetch_status, render
    from netfold.switch_protocol import control_messages

    with exit_on("switch status", ValueError):
        address = control_messages.parse_endpoint(endpoint, what="ENDPOINT")
    try:
        now = fetch_status(address)
        if once or output != STDOUT_TABLE:
            output.show(lambda console: console.print(render(now, None)), json=lambda: now)
            return
        shown = Live(render(now, None), console=plain_console(), auto_refresh=False)
        with contextlib.suppress(KeyboardInterrupt), shown as live:
            while True:
                time.sleep(interval)
                before, now = now, fetch_status(address)
                live.update(render(now, before), refresh=True)
    except OSError as error:
        typer.echo(
            f"netfold switch status: nothing to read at http://{endpoint}/status ({error}). Is the switch up, with "
            f"`--metrics {endpoint}`?",
            err=True,
        )
        raise typer.Exit(FAILED) from None


def _parse_cores(text: str | None) -> list[int]:
    """Parse `2,3`. None gives an empty list. Raises ValueError for a text that is not a list of core numbers."""
    try:
        cores = [int(each) for each in text.split(",")] if text is not None else []
    except ValueError:
        cores = [-1]
    if any(core < 0 for core in cores):
        raise ValueError(f"--cores {text!r}: write core numbers separated by commas, such as 2,3")
    return cores
