"""`netfold top`: pictures of running jobs as tables, for terminals wide and narrow."""

from __future__ import annotations

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from netfold.diagnostics.job import doing
from netfold.diagnostics.sampler import RankRates, Snapshot

# What goes first where there is not room for all columns; `doing` then stands in lines of its own.
_COLUMNS = ("rank", "process", "op/s", "tensor B/s", "wire B/s", "again", "under way", "exposed", "switch")
_SPARE = ("process", "switch", "again", "wire B/s", "tensor B/s", "under way")
_WIDTHS = {
    "rank": 4,
    "process": 8,
    "op/s": 7,
    "tensor B/s": 10,
    "wire B/s": 8,
    "again": 5,
    "under way": 9,
    "exposed": 7,
}
_DOING_WIDTH = 40


class View:
    """Renders pictures as wide as the console is."""

    def __init__(self, pictures: list[Snapshot], now_ns: int) -> None:
        """now_ns: CLOCK_MONOTONIC, to say for how long."""
        self._pictures = pictures
        self._now_ns = now_ns

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for picture in self._pictures:
            yield _show(picture, options.max_width, self._now_ns)


def _show(picture: Snapshot, width: int, now_ns: int) -> RenderableType:
    columns = list(_COLUMNS)
    beside = width >= _needs(columns) + _DOING_WIDTH
    for name in _SPARE:
        if _needs(columns) <= width:
            break
        columns.remove(name)
    table = Table(box=None, title=f"group of {picture.size}", title_justify="left", padding=(0, 2, 0, 0))
    for name in columns:
        table.add_column(name, justify="left" if name == "switch" else "right", no_wrap=True)
    if beside:
        table.add_column("doing", overflow="fold")
    for line in picture.lines:
        cells = _cells(line)
        table.add_row(*(cells[name] for name in columns), *([_doing(line, now_ns)] if beside else []))
    below = [] if beside else [Text(f"rank {line.rank.rank} {_doing(line, now_ns)}") for line in picture.lines]
    return Group(table, *below, *(Text(line) for line in summarise(picture)), Text(""))


def summarise(picture: Snapshot) -> list[str]:
    """Who is last most often, and who is not seen: a sentence each."""
    said = []
    slowest = picture.slowest
    if slowest is not None:
        source = "so the switch says" if slowest.reported_by_switch else "others waited and it had not called"
        said.append(f"slowest: {_ranks(slowest.ranks)}, {slowest.count} of {slowest.of} times; {source}")
    if picture.absent:
        said.append(f"not seen: {_ranks(picture.absent)}, on other hosts or of another user")
    return said


def _ranks(ranks: tuple[int, ...]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _needs(columns: list[str]) -> int:
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
    """Three digits with a prefix of powers of ten, as bandwidths have."""
    for prefix in ("", "k", "M", "G"):
        if value < 999.5:
            return f"{value:.3g} {prefix}".rstrip()
        value /= 1000
    return f"{value:.3g} T"
