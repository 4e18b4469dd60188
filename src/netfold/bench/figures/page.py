"""`figures.html`: one file that needs no network, made of what was measured alone."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from netfold.bench.figures.catalogue import FIGURES
from netfold.bench.figures.figure import Figure, Measurements, Predicted


def render(figures: Mapping[str, Measurements]) -> str:
    """A section a figure. Needs matplotlib. Raises chart.MissingError."""
    known = [(FIGURES[name], taken) for name, taken in figures.items()]
    contents = "".join(f'<li><a href="#{figure.name}">{escape(figure.title)}</a></li>' for figure, _ in known)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>netfold: the talks' figures</title>
<style>{_STYLE}</style>
</head>
<body>
<main>
<h1>The talks' figures, measured here</h1>
<p>Hosts are network namespaces of one machine, their links shaped; the switch is a process. All backends of a figure
take turns in every round, in the same processes (an MPI in its own, on the same hosts). Dots and numbers are
medians, bars and brackets the 5th to the 95th percentile of the rounds; a ratio is taken round by round. A time is
the slowest host's, and every result was checked. A link lets its first 128 KB pass at once, so a time can lie a
little below what the line's rate allows. Read the load below a figure first: where the machine does something else
besides, hosts and switch are slow. All rounds are in <a href="figures.json">figures.json</a>, and as a CSV beside
each figure.</p>
<ol>{contents}</ol>
{"".join(_section(figure, taken) for figure, taken in known)}
</main>
</body>
</html>
"""


def _section(figure: Figure, taken: Measurements) -> str:
    head = f'<section id="{figure.name}">\n<h2>{escape(figure.title)}</h2>\n'
    talk = f"<p><b>The talk reported:</b> {escape(figure.talk)}</p>\n"
    if taken.lack:
        return (
            f'{head}{talk}<p class="failed">Not measured: {escape(taken.lack)}</p>\n{_made(figure, taken)}</section>\n'
        )
    told = figure.tell(taken)
    wrong = f'<p class="failed">{taken.wrong} elements were wrong.</p>' if taken.wrong else ""
    return f"""{head}{wrong}<figure>{told.picture}</figure>
{talk}<p><b>We measured:</b> {escape(told.measured)}</p>
<ul>{"".join(f"<li>{escape(sentence)}</li>" for sentence in (*told.short, *taken.cut))}</ul>
<div class="wide">{_table(told.header, told.table)}</div>
{_predicted(told.predicted)}{_made(figure, taken)}</section>
"""


def _predicted(found: Predicted | None) -> str:
    if found is None:
        return ""
    return f"""<p><b>Predicted, not measured:</b> {escape(found.said)}</p>
<figure>{found.picture}</figure>
<div class="wide">{_table(found.header, found.table)}</div>
"""


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>\n" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _made(figure: Figure, taken: Measurements) -> str:
    of: dict[str, Any] = taken.circumstances
    machine = of["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in of["versions"].items())
    said = (
        f"{machine['cores']} cores of {machine['cpu']}, Linux {machine['kernel']}, load {of['load'][0]:.1f} to "
        f"{of['load'][1]:.1f}; {versions}; {of['date']}, {of['seconds']} s; {of['command']}."
    )
    if "tcp_congestion_control" in of:
        said = f"TCP by {of['tcp_congestion_control']}; {said}"
    return f'<p class="made">{escape(said)} <a href="{figure.name}.csv">All rounds</a></p>\n'


_STYLE = """
:root { color-scheme: light dark; --paper: #fdfdfb; --text: #1d2328; --quiet: #6f7880; --line: #dfe3e4;
  --netfold: #c2410c; --gloo: #0069a8; --third: #00795c; --fourth: #8a4f9e; --bad: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --paper: #15191c; --text: #e5e9eb; --quiet: #929ca3;
  --line: #30373c; --netfold: #ff8a66; --gloo: #5ab8f0; --third: #2bc79a; --fourth: #cc9be0; --bad: #ff8a80; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--text);
  font: 16px/1.55 system-ui, "Segoe UI", "Helvetica Neue", "Noto Sans", "DejaVu Sans", sans-serif; }
main { max-width: 62rem; margin: 0 auto; padding: 3rem 1.5rem 5rem; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 1rem; }
h2 { font-size: 1.25rem; margin: 3.5rem 0 0.8rem; }
p, li { max-width: 48rem; }
p { margin: 0.6rem 0; }
a { color: inherit; }
.failed { border: 2px solid var(--bad); border-radius: 6px; padding: 0.6rem 1rem; color: var(--bad);
  white-space: pre-wrap; overflow-wrap: anywhere; }
.made { color: var(--quiet); font-size: 0.85rem; overflow-wrap: anywhere; }
figure { margin: 0 0 1rem; }
figure svg { width: 100%; height: auto; display: block; }
figure svg text { font-family: inherit !important; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 0.92rem; }
th, td { text-align: right; padding: 0.35rem 0.8rem; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { font-weight: 600; color: var(--quiet); vertical-align: bottom; white-space: normal; min-width: 6rem; }
th:first-child, td:first-child { text-align: left; padding-left: 0; min-width: 4rem; }
"""
