"""Start the ranks of a benchmark, give them orders in turns, and write what was measured.

A script has a function that ranks run and a function that measures. The measuring function opens a `Network` at a
`Place`, starts ranks there, and sends orders with `Ranks.ask`. It returns the body of a page. The last line of a script
is `driver.run(measure)`: the options of the command are the parameters of `measure`, the page is
lab/bench/results/MEASURE.md, and its title is the first line of the docstring of `measure`. The page names the command,
the machine, the commit, the load, and how many times ranks were started.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
import typer

from netfold import Communicator, FileStore, Options
from netfold_lab.bench import ranks
from netfold_lab.bench.network import Network, Place, open_network
from netfold_lab.bench.ranks import Ranks
from netfold_lab.bench.spread import interleave, spread
from netfold_lab.bench.start_line import StartLine
from netfold_lab.bench.table import markdown
from netfold_lab.rack.processes import exit_on_signals, follow, supervise
from netfold_train.runs.machine import spoken

RESULTS = Path(__file__).parent / "results"
# For one start of ranks: an absent rank must not leave the benchmark waiting.
DEADLINE_S = 900.0

Side = TypeVar("Side")
Answer = TypeVar("Answer")


def start_ranks(
    network: Network,
    function: Callable[..., None],
    *arguments: Any,
    python: str = sys.executable,
    deadline_s: float = DEADLINE_S,
    **options: Any,
) -> AbstractContextManager[Ranks]:
    """Start ranks that run `function(rank, *arguments)` of the running script, and wait until all serve orders.

    options: hosts and environment, as of netfold_lab.bench.ranks.start_ranks.
    """
    name, echo = function.__name__, partial(print, file=sys.stderr)
    argv = [python, "-W", "ignore", os.path.abspath(sys.argv[0]), "rank", name]
    return ranks.start_ranks(network, name, argv, arguments, deadline_s=deadline_s, say=echo, **options)


@contextlib.contextmanager
def ranks_at(place: Place, function: Callable[..., None], *arguments: Any, **options: Any) -> Iterator[Ranks]:
    """`open_network` and `start_ranks` in one."""
    with open_network(place) as network, start_ranks(network, function, *arguments, **options) as started:
        yield started


class Rank:
    """A rank of a job, in its own process."""

    def __init__(self, folder: str, orders: ranks.Orders) -> None:
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.folder = Path(folder)
        self.line = StartLine(self.folder / "line", self.rank, self.size)
        self.serve = orders.serve
        self.arguments = orders.begin(self.rank)
        self._torch_groups = itertools.count()

    def time(self, call: Callable[[], Any], calls: int = 1) -> list[float]:
        """Cross the start line with all ranks, and return the seconds of each of `calls` calls."""
        self.line.cross()
        seconds = []
        for _ in range(calls):
            began = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - began)
        return seconds

    def communicator(self, name: str, timeout_s: float = 300.0, **options: Any) -> Communicator:
        """A new group of all ranks. options: of netfold.Options."""
        store = FileStore(self.folder / f"group-{name}")
        return Communicator(store, self.rank, self.size, options=Options(**options), timeout_s=timeout_s)

    @contextlib.contextmanager
    def torch_group(self, backend: str = "netfold", **options: Any) -> Iterator[None]:
        """A new default group of torch inside the block."""
        import torch.distributed as dist

        store = dist.FileStore(f"{self.folder}/torch-{next(self._torch_groups)}", self.size)
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.size, **options)
        yield
        self.line.cross()
        dist.destroy_process_group()


class CheckedSum:
    """all_reduces of `size_bytes` of f32, every element checked.

    Values are whole numbers below 4096, and differ in every call.
    """

    def __init__(self, rank: Rank, size_bytes: int) -> None:
        self._rank = rank
        self._pattern = (np.arange(size_bytes // 4) % 4093).astype(np.float32)
        self._tensor = np.empty_like(self._pattern)
        self._calls = itertools.count()

    def __call__(self, all_reduce: Callable[[Any], object]) -> tuple[float, int]:
        """Seconds of this rank, and wrong elements."""
        call, size = next(self._calls), self._rank.size
        np.add(self._pattern, (self._rank.rank + call) % 4, out=self._tensor)
        (seconds,) = self._rank.time(lambda: all_reduce(self._tensor))
        due = self._pattern * size + sum((rank + call) % 4 for rank in range(size))
        return seconds, int(np.count_nonzero(self._tensor != due))


def take_turns(
    sides: Sequence[Side],
    rounds: int,
    measure: Callable[[Side], Answer],
    *,
    warmups: int = 1,
    at_most: int = 0,
    budget_s: float = 0.0,
) -> dict[Side, list[Answer]]:
    """Measure every side once in each round, another side first each time.

    warmups: the first rounds, which do not count.
    at_most: further rounds follow up to this number, until `budget_s` seconds have passed since the start.
    """
    found: dict[Side, list[Answer]] = {side: [] for side in sides}
    until = time.monotonic() + budget_s
    numbers = range(-warmups, max(rounds, at_most))
    affordable = itertools.takewhile(lambda number: number < rounds or time.monotonic() <= until, numbers)
    for turn, side in interleave(sides, affordable):
        answer = measure(side)
        if turn >= 0:
            found[side].append(answer)
    return found


def slowest(answers: Iterable[Sequence[float]]) -> list[float]:
    """The largest of the ranks' numbers, call by call."""
    return [max(numbers) for numbers in zip(*answers, strict=True)]


def cpu_seconds(pid: int | None) -> float:
    """CPU seconds of all threads of a process so far; 0.0 for no process."""
    threads = [] if pid is None else Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9


@contextlib.contextmanager
def compiled(sources: Iterable[Path], includes: Iterable[Path]) -> Iterator[str]:
    """The path of a C++ program, while the block runs."""
    with tempfile.TemporaryDirectory(prefix="netfold-bench-") as folder:
        program = f"{folder}/program"
        flags = ["-std=c++20", "-O2", *(f"-I{each}" for each in includes)]
        subprocess.run(["c++", *flags, *map(str, sources), "-ldl", "-o", program], check=True)
        yield program


def outputs(
    network: Network, argvs: Sequence[Sequence[str]], environment: Mapping[str, str], deadline_s: float = DEADLINE_S
) -> list[list[str]]:
    """The lines of a command on each host. AssertionError with the last ones of the first that fails."""
    lines: list[list[str]] = [[] for _ in argvs]
    spawned = [
        network.spawn(rank, argv, {**os.environ, **environment, "RANK": str(rank)}) for rank, argv in enumerate(argvs)
    ]
    readers = [follow(process, lines[rank].append) for rank, process in enumerate(spawned)]
    outcome = supervise(spawned, deadline_s)
    for reader in readers:
        reader.join(1)
    failed = outcome.first_failed
    assert outcome.exit_code == 0, f"rank {failed} ended with {outcome.exit_code}: {lines[failed or 0][-5:]}"
    return lines


def run_cpp(sources: Iterable[Path], includes: Iterable[Path], *arguments: object) -> list[list[str]]:
    """Compile a C++ program, run it, and return the words of each line that it prints."""
    with compiled(sources, includes) as program:
        done = subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, check=True)
    return [line.split() for line in done.stdout.splitlines()]


def cell(values: Iterable[float], form: str = ".2f", scale: float = 1.0, apart: str = " (") -> str:
    """The median of `values` with its 5% .. 95%. apart: " | " gives two cells."""
    of = spread([value * scale for value in values])
    return f"{of.median:{form}}{apart}{of.p5:{form}} .. {of.p95:{form}}{')' if '(' in apart else ''}"


def table(head: str, rows: Iterable[Iterable[object]]) -> str:
    """A Markdown table. head: the columns, apart by " | "; a row's cells are written with str()."""
    return "\n".join(markdown(head.split(" | "), [[str(each) for each in row] for row in rows]))


def keep(path: Path, found: Mapping[str, Any], indent: int | None = 1) -> dict[str, Any]:
    """Put raw values into the JSON file `path`, beside what it holds of other names. Returns all of it, by name."""
    kept: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    kept = dict(sorted({**kept, **found}.items()))
    path.write_text(json.dumps(kept, indent=indent) + "\n")
    return kept


def be_rank() -> bool:
    """Be the rank that `start_ranks` wants of this process. Returns whether it wants one."""
    if sys.argv[1:2] != ["rank"]:
        return False
    _, _, function, folder, deadline_s = sys.argv
    with ranks.connect(folder, deadline_s) as orders:
        rank = Rank(folder, orders)
        getattr(sys.modules["__main__"], function)(rank, *rank.arguments)
    return True


def run(*measures: Callable[..., str]) -> None:
    """Be one of a script's ranks, or its command: with several `measures` each is a subcommand of its own name."""
    if be_rank():
        return
    script = sys.modules["__main__"]
    # The variables of the caller's shell are no part of a measurement.
    for name in [each for each in os.environ if each.startswith("NETFOLD_") and not each.startswith("NETFOLD_BENCH_")]:
        del os.environ[name]
    app = typer.Typer(add_completion=False, help=script.__doc__, rich_markup_mode=None, pretty_exceptions_enable=False)
    for measure in measures:
        app.command(measure.__name__.replace("_", "-"), help=None if len(measures) > 1 else script.__doc__)(
            _command(measure)
        )
    app()


def _command(measure: Callable[..., str]) -> Callable[..., None]:
    """`measure` as a command that writes the page: the parameters of `measure`, and --output."""
    title = inspect.getdoc(measure).splitlines()[0].rstrip(".")  # type: ignore[union-attr]

    def command(output: Path, **settings: Any) -> None:
        load = os.getloadavg()[0]
        with exit_on_signals():
            body = measure(**settings)
        shown = ", ".join(f"{name} {value}" for name, value in settings.items() if value not in (None, ""))
        line = shlex.join(["bench/" + Path(sys.argv[0]).name, *sys.argv[1:]])
        head = f"`{line}` ({shown or 'no options'})"
        # A script may start commands that start ranks.
        head += f"; ranks were started {ranks.launches} times." if ranks.launches else "."
        text = f"# {title}\n\n{head} {spoken(load)}\n\n{body.strip()}\n"
        output.write_text(text)
        print(text)

    default = RESULTS / f"{measure.__name__}.md"
    annotation = Annotated[Path, typer.Option("--output", "-o", help="The page to write.")]
    signature = inspect.signature(measure, eval_str=True)
    option = inspect.Parameter("output", inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
    parameters = [*signature.parameters.values(), option]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__doc__ = measure.__doc__
    return command
