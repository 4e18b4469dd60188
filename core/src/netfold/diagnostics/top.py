"""`netfold top`: snapshots of running jobs as tables, for wide and narrow terminals."""

from __future__ import annotations

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from netfold.diagnostics.job import doing
from netfold.diagnostics.sampler import RankRates, Snapshot

# On a narrow terminal, _SPARE lists the columns in the order of removal, and `doing` moves below the table.
_COLUMNS = ("rank", "process", "op/s", "tensor B/s", "wire B/s", "again", "under way", "exposed", "switch")
_SPARE = ("process", "switch", "again", "wire B/s", "tensor B/s", "under way")
# Columns whose cells may be wider than their name.
_WIDTHS = {"process": 8, "op/s": 7}
_DOING_WIDTH = 40


class View:
    """Renders snapshots in the console's width."""

    def __init__(self, snapshots: list[Snapshot], now_ns: int) -> None:
        """now_ns: CLOCK_MONOTONIC, to compute durations."""
        self._snapshots = snapshots
        self._now_ns = now_ns

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for job in jobs(self._snapshots):
            first = job[0].lines[0].rank
            title = f"job of process {first.pid}: {first.command}"
            yield Text(title, style="bold", no_wrap=True, overflow="ellipsis")
            for snapshot in job:
                yield _render(snapshot, options.max_width, self._now_ns)


def jobs(snapshots: list[Snapshot]) -> list[list[Snapshot]]:
    """Put the groups of one job together: those that share a process, directly or by other groups.

    The job of the lowest process number is first, and in each job the group of the lowest one.
    """
    found: list[tuple[set[int], list[Snapshot]]] = []
    for snapshot in sorted(snapshots, key=lambda each: min((line.rank.pid, line.rank.group) for line in each.lines)):
        processes = {line.rank.pid for line in snapshot.lines}
        shared = [job for job in found if job[0] & processes]
        found = [job for job in found if job not in shared]
        members = [member for job in shared for member in job[1]]
        found.append((processes.union(*(job[0] for job in shared)), [*members, snapshot]))
    return [members for _, members in sorted(found, key=lambda job: min(job[0]))]


def _render(snapshot: Snapshot, width: int, now_ns: int) -> RenderableType:
    columns = list(_COLUMNS)
    doing_in_table = width >= _width(columns) + _DOING_WIDTH
    for name in _SPARE:
        if _width(columns) <= width:
            break
        columns.remove(name)
    table = Table(box=None, title=f"group of {snapshot.size}", title_justify="left", padding=(0, 2, 0, 0))
    for name in columns:
        table.add_column(name, justify="left" if name == "switch" else "right", no_wrap=True)
    if doing_in_table:
        table.add_column("doing", overflow="fold")
    for line in snapshot.lines:
        cells = _cells(line)
        table.add_row(*(cells[name] for name in columns), *([_doing(line, now_ns)] if doing_in_table else []))
    below = [] if doing_in_table else [Text(f"rank {line.rank.rank} {_doing(line, now_ns)}") for line in snapshot.lines]
    return Group(table, *below, *(Text(line) for line in summarise(snapshot)), Text(""))


def summarise(snapshot: Snapshot) -> list[str]:
    """Name the slowest rank, and the ranks that are not seen: a sentence each."""
    sentences = []
    slowest = snapshot.slowest
    if slowest is not None:
        source = "so the switch says" if slowest.reported_by_switch else "others waited and it had not called"
        sentences.append(f"slowest: {_ranks(slowest.ranks)}, {slowest.count} of {slowest.of} times; {source}")
    if snapshot.absent:
        sentences.append(f"not seen: {_ranks(snapshot.absent)}, on other hosts or of another user")
    return sentences


def _ranks(ranks: tuple[int, ...]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _width(columns: list[str]) -> int:
    return sum(_WIDTHS.get(name, len(name)) + 2 for name in columns)


def _cells(line: RankRates) -> dict[str, str]:
    rank = line.rank
    return {
        "rank": str(rank.rank),
        "process": str(rank.pid),
        "op/s": f"{line.operations_per_s:.3g}" if line.operations_per_s < 1000 else f"{line.operations_per_s:.0f}",
        "tensor B/s": _amount(line.tensor_bytes_per_s),
        "wire B/s": _amount(line.wire_bytes_per_s),
        "again": str(line.retransmissions),
        "under way": f"{line.under_way_share:.0%}",
        "exposed": "-" if line.exposed_share is None else f"~{line.exposed_share:.0%}",
        "switch": "lost" if rank.without_switch else "yes" if rank.with_switch else "no",
    }


def _doing(line: RankRates, now_ns: int) -> str:
    if line.has_ended:
        return "has ended"
    return f"has failed: {line.rank.failure}" if line.rank.failure else doing(line.rank, now_ns)


def _amount(value: float) -> str:
    """Format with three digits and a decimal prefix."""
    for prefix in ("", "k", "M", "G"):
        if value < 999.5:
            return f"{value:.3g} {prefix}".rstrip()
        value /= 1000
    return f"{value:.3g} T"
