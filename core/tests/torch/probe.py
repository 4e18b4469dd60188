"""Try what torch.distributed offers, feature by feature, over one backend: what works with the installed torch.

    python core/tests/torch/probe.py BACKEND [FEATURE ...]      # one JSON object on standard output: feature -> result
    python core/tests/torch/probe.py netfold --against gloo     # both; fails where netfold loses without an explanation
    python core/tests/torch/probe.py --list

A feature is a function that two forked ranks run, in a group of their own and within a deadline. Its result is "ok",
"absent: ..." where the installed torch does not have the feature at all, or the first rank's error. Features stand in
the modules `probe_*.py` beside this one; none of them knows the backend's name but from its `World`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

RANKS = 2
DEADLINE_S = 20.0
# How long the other rank may still take to tell its own error once one rank has failed.
GRACE_S = 0.5
MODULES = (
    "probe_collectives",
    "probe_point_to_point",
    "probe_groups",
    "probe_training",
    "probe_compiled",
    "probe_observation",
)


class AbsentError(Exception):
    """The installed torch does not have the feature, whatever the backend."""


@dataclass
class World:
    """One rank's place in a probe."""

    backend: str
    rank: int
    size: int
    folder: str  # of the two ranks, empty at the start
    made: int = field(default=0)

    def init(self, **options: Any) -> None:
        """`init_process_group` over a fresh file, the backend by its name."""
        import torch.distributed as dist

        self.made += 1
        where = {"init_method": f"file://{self.folder}/store-{self.made}"} if "store" not in options else {}
        dist.init_process_group(
            **{"backend": self.backend, **where, "rank": self.rank, "world_size": self.size, **options}
        )


@dataclass(frozen=True)
class Feature:
    """`function` runs on each rank, in a group that was made for it where `grouped`. `environment` is set before
    torch's first use in the rank; `imports` are loaded once, before the ranks are forked."""

    name: str
    function: Callable[[World], None]
    grouped: bool = True
    deadline_s: float = DEADLINE_S
    environment: tuple[tuple[str, str], ...] = ()
    imports: tuple[str, ...] = ()


FEATURES: dict[str, Feature] = {}


def feature(**how: Any) -> Callable[[Callable[[World], None]], Callable[[World], None]]:
    """Register a function as the feature of its name. Arguments are those of `Feature`."""

    def register(function: Callable[[World], None]) -> Callable[[World], None]:
        name = function.__name__
        assert name not in FEATURES, name
        FEATURES[name] = Feature(name, function, **how)
        return function

    return register


@contextlib.contextmanager
def refused(*words: str) -> Iterator[None]:
    """The block must raise an error that has one of `words` in its text."""
    try:
        yield
    except Exception as error:
        assert any(word.lower() in str(error).lower() for word in words), f"{type(error).__name__}: {error}"
    else:
        raise AssertionError(f"nothing was raised; expected an error with one of {words}")


def load() -> dict[str, Feature]:
    """All features, in the order of their modules."""
    # The modules say `from probe import feature`: this one must be theirs, also where it is the script.
    sys.modules.setdefault("probe", sys.modules[__name__])
    for name in MODULES:
        importlib.import_module(name)
    return FEATURES


def probe(backend: str, names: list[str] | None = None, *, deadline_factor: float = 1.0) -> dict[str, str]:
    """Run the features (all by default) one after the other; feature -> "ok", "absent: ..." or what went wrong."""
    chosen = [each for each in load().values() if not names or each.name in names]
    import torch.distributed  # noqa: F401 - once, for all ranks

    for module in sorted({module for each in chosen for module in each.imports}):
        with contextlib.suppress(ImportError):  # the feature itself reports it
            importlib.import_module(module)
    found = {}
    for each in chosen:
        began = time.monotonic()
        found[each.name] = run(each, backend, deadline_factor)
        print(f"{each.name}: {found[each.name][:100]} ({time.monotonic() - began:.1f} s)", file=sys.stderr, flush=True)
    passed = sum(text == "ok" for text in found.values())
    absent = sum(text.startswith("absent") for text in found.values())
    print(f"{backend}: {passed} of {len(found)} work, {absent} absent in this torch", file=sys.stderr, flush=True)
    return found


def run(each: Feature, backend: str, deadline_factor: float = 1.0) -> str:
    fork = multiprocessing.get_context("fork")
    deadline_s = each.deadline_s * deadline_factor
    with tempfile.TemporaryDirectory(prefix="netfold-probe-") as folder:
        readers: dict[Any, int] = {}
        processes = []
        for rank in range(RANKS):
            reader, writer = fork.Pipe(duplex=False)
            process = fork.Process(target=_rank, args=(each, World(backend, rank, RANKS, folder), writer))
            process.start()
            writer.close()
            readers[reader] = rank
            processes.append(process)
        try:
            found = _results(readers, deadline_s)
            deadline = time.monotonic() + deadline_s
            if all(text == "ok" for text in found.values()):
                for rank, process in enumerate(processes):
                    process.join(max(0.0, deadline - time.monotonic()))
                    if process.exitcode is None:
                        found[rank] = f"rank {rank} returned, but its process did not end within {deadline_s:g} s"
                    elif process.exitcode:
                        found[rank] = f"rank {rank} returned, but its process ended with {process.exitcode}"
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):  # its compilers, too
                    os.killpg(process.pid, signal.SIGKILL)
                process.join()
    return next((text for text in found.values() if text != "ok"), "ok")


def _results(readers: dict[Any, int], deadline_s: float) -> dict[int, str]:
    """Each rank's own words in the order of their coming; those that are silent at the deadline come last."""
    found: dict[int, str] = {}
    deadline = time.monotonic() + deadline_s
    while readers:
        ready = wait(list(readers), max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for reader in ready:
            assert isinstance(reader, Connection)
            rank = readers.pop(reader)
            try:
                found[rank] = reader.recv()
            except EOFError:
                found[rank] = f"rank {rank} ended without a result"
            reader.close()
            if found[rank] != "ok":
                deadline = min(deadline, time.monotonic() + GRACE_S)
    if all(text == "ok" for text in found.values()):
        found.update({rank: f"rank {rank} gave no result within {deadline_s:g} s" for rank in readers.values()})
    return found


def _rank(each: Feature, world: World, writer: Connection) -> None:
    os.setpgid(0, 0)
    # What ranks print is for people; standard output is for the results.
    os.dup2(2, 1)
    os.environ.update(each.environment)
    try:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        if each.grouped:
            world.init()
        each.function(world)
        if dist.is_initialized():
            dist.destroy_process_group()
        text = "ok"
    except AbsentError as error:
        text = f"absent: {error}"
    except BaseException as error:
        lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
        text = f"{type(error).__name__}: {' '.join(lines)[:400]}"
        if "NETFOLD_PROBE_TRACEBACK" in os.environ:
            import traceback

            traceback.print_exc()
    writer.send(text)
    writer.close()


def compare(backend: str, other: str, names: list[str], deadline_factor: float) -> dict[str, Any]:
    """The functions of both. Lost: works over `other` alone and is not explained. Unneeded: is explained, and works."""
    import torch
    from probe_explained import EXPLAINED, explained

    found = {each: probe(each, names, deadline_factor=deadline_factor) for each in (other, backend)}
    lost = {
        name: text
        for name, text in found[backend].items()
        if text != "ok" and found[other][name] == "ok" and not explained(name, torch.__version__)
    }
    unneeded = [name for name in EXPLAINED if found[backend].get(name) == "ok" and explained(name, torch.__version__)]
    return {"torch": torch.__version__, **found, "lost": lost, "unneeded explanations": unneeded}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backend", nargs="?", help="gloo, netfold or another registered name")
    parser.add_argument("features", nargs="*", metavar="FEATURE", help="all by default")
    parser.add_argument("--against", metavar="BACKEND", help="run both, and say what works over that one alone")
    parser.add_argument("--json", metavar="FILE", help="write the results there, too")
    parser.add_argument("--list", action="store_true", help="print the features' names and end")
    parser.add_argument("--deadline-factor", type=float, default=1.0, help="multiply every feature's deadline")
    parser.add_argument("--traceback", action="store_true", help="print errors of ranks in full on standard error")
    asked = parser.parse_intermixed_args()
    if asked.list:
        print("\n".join(load()))
        return 0
    unknown = sorted(set(asked.features) - set(load()))
    if asked.backend is None or unknown:
        parser.error(f"no such feature: {', '.join(unknown)}" if unknown else "a backend is needed")
    if asked.traceback:
        os.environ["NETFOLD_PROBE_TRACEBACK"] = "1"
    if asked.against:
        compared = compare(asked.backend, asked.against, asked.features, asked.deadline_factor)
        text, bad = json.dumps(compared, indent=1), bool(compared["lost"])
    else:
        found = probe(asked.backend, asked.features, deadline_factor=asked.deadline_factor)
        text = json.dumps(found, indent=1)
        bad = any(each != "ok" and not each.startswith("absent") for each in found.values())
    print(text)
    if asked.json:
        with open(asked.json, "w") as file:
            file.write(f"{text}\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
