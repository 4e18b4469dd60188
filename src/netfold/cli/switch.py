"""`netfold switch`: run an aggregator, and look at one."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import Awaitable
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Run an aggregator: it adds up the gradients of the jobs that join it.")

# As of a shell: the command line, or this machine, cannot do what was asked.
CANNOT = 2
# So that a container's health check follows its switch to another port.
METRICS = "NETFOLD_SWITCH_METRICS"


@app.callback(invoke_without_command=True)
def switch(
    context: typer.Context,
    listen: Annotated[
        str, typer.Option(help="Address and port to listen on; port 0 takes a free one.")
    ] = "127.0.0.1:7171",
    open_to_all: Annotated[
        bool,
        typer.Option("--open", help="Serve a network address without TLS and tokens, on a trusted wire."),
    ] = False,
    token_file: Annotated[
        Path | None, typer.Option(help="Lines of `tenant token` (docs/reference/switch.md); turns TLS on.")
    ] = None,
    state_dir: Annotated[
        Path | None, typer.Option(help="Folder for the certificate; else each start has a new fingerprint.")
    ] = None,
    parent: Annotated[
        str | None,
        typer.Option(
            help="A switch above this one, host:port or host:port#fingerprint: sums of jobs that have workers beyond "
            "this switch go there."
        ),
    ] = None,
    parent_token_file: Annotated[
        Path | None, typer.Option(help="A file with this switch's token for its parent, and nothing else.")
    ] = None,
    max_jobs: Annotated[int, typer.Option(min=1, help="Jobs served at once.")] = 64,
    max_workers: Annotated[int, typer.Option(min=1, max=256, help="Workers a job may have.")] = 256,
    memory: Annotated[str, typer.Option(help="Memory for slots of all jobs, such as 512M or 2G.")] = "1G",
    window: Annotated[str, typer.Option(help="Bytes one worker may have in flight.")] = "1M",
    threads: Annotated[
        int,
        typer.Option(
            min=1,
            max=64,
            help="Threads that handle packets, each those of jobs of its own. A group that names this switch twice in "
            "NETFOLD_SWITCH goes over two of them.",
        ),
    ] = 1,
    cores: Annotated[
        str | None,
        typer.Option(help="Cores such as 2,3: a thread on each that stays there, with its jobs' memory near it."),
    ] = None,
    busy_poll: Annotated[
        int,
        typer.Option(
            min=0,
            max=1_000_000,
            help="Microseconds that a thread looks for packets without sleep after the last one: quicker answers, for "
            "a core that is never idle while a job runs.",
        ),
    ] = 0,
    fabric: Annotated[
        list[str] | None,
        typer.Option(
            help="A provider of libfabric, as in NETFOLD_TRANSPORT=fabric:PROVIDER, over which packets may come beside "
            "UDP; may be said more than once (docs/how-to/fabric.md)."
        ),
    ] = None,
    metrics: Annotated[
        str | None,
        typer.Option(
            envvar=METRICS,
            help="Address and port for /metrics, /healthz and /status: plain HTTP, readable by who reaches it.",
        ),
    ] = None,
    drain_s: Annotated[
        float, typer.Option("--drain-s", min=0, help="Seconds that running jobs have to end after SIGTERM.")
    ] = 30.0,
    log: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
) -> None:
    """Run an aggregator: it adds up the gradients of the jobs that join it.

    Workers find it by NETFOLD_SWITCH, set to what it says when it listens. The address above is TCP, for membership;
    each job gets a UDP port of its own for data, or an endpoint on its --fabric. SIGTERM drains it: no new job, and
    running ones have --drain-s seconds; Ctrl-C, or a second signal, stops it at once. Workers that are still there are
    told, and the exit code is 0.
    """
    if context.invoked_subcommand is not None:
        return
    from netfold.bench.sizes import parse_size
    from netfold.switch import Limits, Switch, Tokens
    from netfold.switch.http import HttpServer
    from netfold.switch.log import LogfmtFormatter, RateLimit, event
    from netfold.switch.parent import Parent
    from netfold.switch_protocol import control_messages

    level = getattr(logging, log.upper(), None)
    if not isinstance(level, int):
        raise typer.BadParameter(f"{log!r} is not a log level", param_hint="--log")
    output = logging.StreamHandler(sys.stderr)
    output.setFormatter(LogfmtFormatter())
    output.addFilter(RateLimit())
    logging.basicConfig(level=level, handlers=[output])
    try:
        host, port = control_messages.parse_endpoint(listen, what="--listen")
        limits = Limits(
            jobs=max_jobs,
            workers=max_workers,
            memory_bytes=parse_size(memory),
            window_bytes=parse_size(window),
        )
        places = _cores_of(cores)
        if places and threads not in (1, len(places)):
            raise ValueError(f"--threads {threads} and --cores {cores}: there is a thread for each core")
        tokens = None if token_file is None else Tokens.read(token_file)
        if parent is None and parent_token_file is not None:
            raise ValueError("--parent-token-file is for the switch that --parent names, and none is")
        above = None if parent is None else Parent(parent, parent_token_file)
        daemon = Switch(
            host,
            port,
            limits=limits,
            open_to_all=open_to_all,
            tokens=tokens,
            state_dir=state_dir,
            parent=above,
            threads=len(places) or threads,
            cores=places,
            busy_poll_s=busy_poll / 1e6,
            fabrics=fabric or (),
        )
        web = (
            None
            if metrics is None
            else HttpServer(*control_messages.parse_endpoint(metrics, what="--metrics"), daemon.status)
        )
    except ValueError as error:
        typer.echo(f"netfold switch: {error}", err=True)
        raise typer.Exit(CANNOT) from None
    except OSError as error:
        typer.echo(f"netfold switch: {error.filename or state_dir}: {error.strerror}", err=True)
        raise typer.Exit(1) from None

    async def serve() -> None:
        told = asyncio.Event()
        at_once = asyncio.Event()
        signals: list[signal.Signals] = []

        def stop(number: signal.Signals) -> None:
            signals.append(number)
            told.set()
            if number == signal.SIGINT or len(signals) > 1:
                at_once.set()

        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop, number)
        if web is not None:
            address = await bind(web.start(), metrics or "")
            event(logging.INFO, "metrics", f"metrics at http://{address}/metrics", address=address)
        endpoint = await bind(daemon.start(), listen)
        # One line on stdout, for who starts a switch from a program; all else is log, on stderr.
        print(f"netfold switch listening on {endpoint}", flush=True)
        try:
            await daemon.check_parent()
        except ValueError as error:
            typer.echo(f"netfold switch: {error}", err=True)
            await daemon.stop("its parent is below it")
            raise typer.Exit(CANNOT) from None
        await told.wait()
        reason = signals[0].name
        drained = asyncio.ensure_future(daemon.drain(reason, drain_s))
        hurried = asyncio.ensure_future(at_once.wait())
        await asyncio.wait([drained, hurried], return_when=asyncio.FIRST_COMPLETED)
        for each in (drained, hurried):
            each.cancel()
        await daemon.stop(reason)
        if web is not None:
            web.stop()
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
            raise typer.Exit(1) from None

    asyncio.run(serve())


@app.command()
def status(
    endpoint: Annotated[str, typer.Argument(envvar=METRICS, help="host:port of the switch's --metrics.")],
    once: Annotated[bool, typer.Option("--once", help="Print it once.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print it once, as JSON.")] = False,
    every_s: Annotated[float, typer.Option("--every-s", min=0.1, help="Seconds between two looks.")] = 1.0,
) -> None:
    """What a switch is doing: its jobs, their traffic, and which rank is late. Ctrl-C ends it.

    The exit code is 1 when the switch does not answer.
    """
    import json
    import time

    from rich.console import Console
    from rich.live import Live

    from netfold.switch.status_table import fetch_status, render
    from netfold.switch_protocol import control_messages

    try:
        address = control_messages.parse_endpoint(endpoint, what="ENDPOINT")
    except ValueError as error:
        typer.echo(f"netfold switch status: {error}", err=True)
        raise typer.Exit(CANNOT) from None
    try:
        now = fetch_status(address)
        if as_json:
            print(json.dumps(now, indent=2))
            return
        # A pipe has no width; a line a job is what a program can cut up.
        console = Console(width=None if sys.stdout.isatty() else 160)
        if once:
            console.print(render(now, None))
            return
        with (
            contextlib.suppress(KeyboardInterrupt),
            Live(render(now, None), console=console, auto_refresh=False) as live,
        ):
            while True:
                time.sleep(every_s)
                before, now = now, fetch_status(address)
                live.update(render(now, before), refresh=True)
    except OSError as error:
        typer.echo(
            f"netfold switch status: nothing to read at http://{endpoint}/status ({error}). Is the switch up, with "
            f"`--metrics {endpoint}`?",
            err=True,
        )
        raise typer.Exit(1) from None


def _cores_of(text: str | None) -> list[int]:
    """`2,3` as numbers; none for None. ValueError for what is none of that."""
    try:
        cores = [int(each) for each in text.split(",")] if text is not None else []
    except ValueError:
        cores = [-1]
    if any(core < 0 for core in cores):
        raise ValueError(f"--cores {text!r}: write numbers of cores with commas between, such as 2,3")
    return cores
