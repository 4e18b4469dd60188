"""`netfold nccl-env`: the variables with which NCCL finds netfold's plugins: network, profiler, tuner."""

from __future__ import annotations

import importlib.util
import os
import shlex
from importlib.metadata import distributions
from pathlib import Path
from typing import Annotated

import typer

from netfold.cli.verb import CANNOT

# The first NCCL that loads a version of the plugin's interface.
LEAST_NCCL = (2, 20, 3)
LEAST_PROFILER, LEAST_TUNER = (2, 27), (2, 22)
# A shared object of its own, beside the plugin (core/native/nccl/tuner).
TUNER = "libnccl-tuner-netfold.so"


def plugin() -> Path:
    """The plugin's shared object, which may be absent from a build of one's own."""
    spec = importlib.util.find_spec("netfold._native")
    assert spec is not None and spec.origin is not None, "netfold has a native module"
    return Path(spec.origin).parent / "nccl" / "libnccl-net-netfold.so"


def nccl_env(
    require: Annotated[
        bool,
        typer.Option("--require", help="NCCL stops where the plugin, or the switch of NETFOLD_SWITCH, cannot be used."),
    ] = False,
    profile: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Record NCCL's operations there, for `netfold profile`. All ranks use one folder."
        ),
    ] = None,
    tune: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Let this table of `netfold nccl-tuning` choose NCCL's algorithms."),
    ] = None,
) -> None:
    """Print variables for the ranks of a job: `eval "$(netfold nccl-env)"`. NCCL then sends over netfold's streams.

    Set them on every rank. What will be used goes to standard error. With NETFOLD_SWITCH, NCCL also adds through that
    switch (CollNet).
    """
    found = plugin()
    if not found.exists():
        typer.echo(f"nccl-env: {found} is absent: this build of netfold has no plugin for NCCL", err=True)
        raise typer.Exit(CANNOT)
    # NCCL before 2.21 takes no path, and adds "libnccl-net-" and ".so" to the name.
    folder = shlex.quote(str(found.parent))
    typer.echo(f'export LD_LIBRARY_PATH={folder}"${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}"')
    typer.echo("export NCCL_NET_PLUGIN=netfold")
    if require:
        typer.echo("export NCCL_NET=netfold")
    switch = os.environ.get("NETFOLD_SWITCH", "")
    if switch:
        typer.echo("export NCCL_COLLNET_ENABLE=1")
        if require:
            typer.echo("export NETFOLD_NCCL_REQUIRE_SWITCH=1")
    if profile is not None:
        typer.echo(f"export NCCL_PROFILER_PLUGIN={found.name}")
        typer.echo(f"export NETFOLD_PROFILE={shlex.quote(str(profile.absolute()))}")
    if tune is not None:
        typer.echo(f"export NCCL_TUNER_PLUGIN={TUNER}")
        typer.echo(f"export NETFOLD_NCCL_TUNER={shlex.quote(str(tune.absolute()))}")
    otherwise = "stops" if require else "uses its own sockets"
    typer.echo(
        f"nccl-env: NCCL 2.20.3 or later will send over netfold's TCP streams; where the plugin cannot be used, NCCL "
        f"{otherwise}, and NCCL_DEBUG=INFO says why",
        err=True,
    )
    if switch:
        endpoint = switch.partition("#")[0]
        when_refused = "stops" if require else "goes on with its own algorithms"
        typer.echo(
            f"nccl-env: NCCL's CollNet will add through the switch at {endpoint}, between 2 hosts and more; where that "
            f"refuses a rank, NCCL {when_refused}. NETFOLD_SWITCH must be set on every rank",
            err=True,
        )
    needs: list[tuple[tuple[int, ...], str]] = [(LEAST_NCCL, "the plugin")]
    needs += [(LEAST_PROFILER, "the profiler")] if profile is not None else []
    needs += [(LEAST_TUNER, "the tuner")] if tune is not None else []
    for package, numbers in _installed_nccls():
        installed = ".".join(map(str, numbers))
        for least, what in needs:
            if numbers < least:
                needed = ".".join(map(str, least))
                typer.echo(
                    f"nccl-env: {package} {installed} is older than {needed}, and will not load {what}", err=True
                )


def _installed_nccls() -> list[tuple[str, tuple[int, ...]]]:
    """NCCL as PyPI has it, by package: nvidia-nccl-cu12 and others."""
    found = {}
    for each in distributions():
        name = each.metadata["Name"] or ""
        if name.startswith("nvidia-nccl"):
            numbers = each.version.split("+")[0].split(".")
            found[name] = tuple(int(number) for number in numbers if number.isdigit())
    return sorted(found.items())
