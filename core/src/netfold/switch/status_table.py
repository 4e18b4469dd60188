"""A switch's status for people: read over HTTP and rendered as a table, a row for each job."""

from __future__ import annotations

import http.client
import json
import urllib.request
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from netfold.switch_protocol import control_messages

# The page of 64 jobs of 256 ranks has some megabytes.
MAX_STATUS_BYTES = 64 << 20
READ_S = 5.0


def fetch_status(address: tuple[str, int]) -> dict[str, Any]:
    """Read /status of the switch whose --metrics is at `address`. Raises OSError where there is none."""
    url = f"http://{control_messages.format_endpoint(*address)}/status"
    # Ignore the environment's proxies: a switch is reached directly.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=READ_S) as page:
            body = page.read(MAX_STATUS_BYTES)
        status = json.loads(body)
        if not isinstance(status, dict) or "incarnation" not in status:
            raise ValueError("another service's page")
    except (ValueError, http.client.HTTPException) as error:
        raise OSError(f"no status of a switch: {error}") from None
    return status


def render(now: dict[str, Any], before: dict[str, Any] | None) -> RenderableType:
    """Render the status `now`.

    before: an earlier status, since which rates are computed; None: since each job's start.
    """
    headline = Text(_headline(now))
    if not now["jobs"]:
        return headline
    table = Table(box=None)
    for name in ("job", "name", "workers", "MiB", "Mbit/s", "at most", "busy slots", "again", "dropped", "latest rank"):
        table.add_column(name, justify="left" if name in ("job", "name", "latest rank") else "right", no_wrap=True)
    earlier = {} if before is None else {job["id"]: job for job in before["jobs"]}
    for job in now["jobs"]:
        table.add_row(*_row(job, earlier.get(job["id"])))
    return Group(headline, table)


def _headline(now: dict[str, Any]) -> str:
    granted = now["memory_granted_bytes"]
    parent = now["parent"]
    below = ""
    if parent is not None:
        below = f"; below {parent['endpoint']} with {parent['jobs']} jobs"
        below += f" ({parent['last_error']})" if parent["last_error"] else ""
    fabrics = "".join(f"; {jobs} jobs over provider {provider}" for provider, jobs in now["fabrics"].items())
    total = granted + now["memory_free_bytes"]
    return (
        f"{now['state']} for {now['uptime_s']:.0f} s: {len(now['jobs'])} of {now['jobs_limit']} jobs, "
        f"{granted / 2**20:.1f} of {total / 2**20:.0f} MiB granted, {now['connections']} connections, "
        f"{sum(now['refusals'].values())} refusals, packets {'' if now['authenticated'] else 'not '}authenticated"
        f"{fabrics}{below}"
    )


def _row(job: dict[str, Any], earlier: dict[str, Any] | None) -> list[str]:
    counters = job["counters"]
    seconds = job["age_s"] - (earlier["age_s"] if earlier else 0.0)
    done = counters["result_bytes"] - (earlier["counters"]["result_bytes"] if earlier else 0)
    busy = f"{counters['slots_collecting']}/{counters['slots']}" if counters["slots"] else "-"
    capacity = job["capacity_bytes_per_s"]
    return [
        job["id"],
        job["name"],
        str(job["size"]) if job["state"] == "running" else f"{job['joined']} of {job['size']}",
        f"{job['memory_bytes'] / 2**20:.1f}",
        f"{done * 8e-6 / seconds:.0f}" if seconds > 0 else "-",
        "-" if capacity is None else f"{capacity * 8e-6:.0f}",
        busy,
        str(job["retransmissions"]),
        str(sum(counters["drops"].values())),
        _latest(job, earlier),
    ]


def _latest(job: dict[str, Any], earlier: dict[str, Any] | None) -> str:
    """The rank with the largest mean lag, that lag, and for how many chunks all other ranks waited for it."""
    known = {each["rank"]: each for each in earlier["ranks"]} if earlier else {}
    lags = []
    for each in job["ranks"]:
        since = known.get(each["rank"], {"arrivals": 0, "lag_s": 0.0, "last": 0})
        arrivals = each["arrivals"] - since["arrivals"]
        if arrivals > 0:
            lags.append(((each["lag_s"] - since["lag_s"]) / arrivals, _who(each), each["last"] - since["last"]))
    if not lags:
        return "-"
    lag_s, who, last = max(lags)
    return f"{who}: {lag_s * 1e3:.1f} ms, {last} x last"


def _who(each: dict[str, Any]) -> str:
    return f"leaf of {each['rank']}" if each["ranks_below"] else str(each["rank"])
