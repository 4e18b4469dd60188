"""`figures.html`: one file without network, with a section for each figure."""

from collections.abc import Sequence
from typing import Any

from netfold.page.escape import escape, items
from netfold.page.layout import render_layout
from netfold.page.table import text_table
from netfold_lab.bench.figures.figure import Figure, Measurements, Predicted
from netfold_train.runs.machine import in_words

_METHOD = """<p>Hosts are network namespaces of one machine with shaped links; the switch is a process. In every round
each backend of a figure runs once, in the same processes (an MPI in its own, on the same hosts). Points and numbers are
medians; bars and brackets are the 5th to the 95th percentile of the rounds. A ratio is computed for each round. A time
is that of the slowest host, and every result was checked. A link lets its first 128 KB pass at once, so a time can be a
little below the limit of the line rate. Read the load below a figure first: hosts and switch are slow while other
programs run. All rounds are in <a href="figures.json">figures.json</a>, and in a CSV file for each figure.</p>"""


def render(figures: Sequence[tuple[Figure, Measurements]]) -> str:
    contents = "".join(f'<li><a href="#{figure.name}">{escape(figure.title)}</a></li>' for figure, _ in figures)
    return render_layout(
        title="netfold: the talks' figures",
        headline="The talks' figures, measured here",
        opening=f"{_METHOD}\n<ol>{contents}</ol>",
        sections=[(figure.name, figure.title, _section(figure, taken)) for figure, taken in figures],
    )


def _section(figure: Figure, taken: Measurements) -> str:
    talk = f"<p><b>The talk reported:</b> {escape(figure.talk)}</p>"
    if taken.lack:
        return f'{talk}<p class="failed">Not measured: {escape(taken.lack)}</p>{_made(figure, taken)}'
    text = figure.tell(taken)
    wrong = f'<p class="failed">{taken.wrong} elements were wrong.</p>' if taken.wrong else ""
    return f"""{wrong}{text.picture}
{talk}<p><b>We measured:</b> {escape(text.measured)}</p>
{items([*text.short, *taken.cut])}
{text_table(f"{figure.name}-table", "Measured.", text.header, text.table)}
{_predicted(figure.name, text.predicted)}{_made(figure, taken)}"""


def _predicted(name: str, found: Predicted | None) -> str:
    if found is None:
        return ""
    return f"""<p><b>Predicted, not measured:</b> {escape(found.text)}</p>
{found.picture}
{text_table(f"{name}-predicted", "Predicted by the cost model.", found.header, found.table)}
"""


def _made(figure: Figure, taken: Measurements) -> str:
    of: dict[str, Any] = taken.circumstances
    measured_on = in_words(of["machine"], of["load"], of["versions"])
    text = f"{measured_on}; {of['date']}, {of['seconds']} s; {of['command']}."
    if "tcp_congestion_control" in of:
        text = f"TCP by {of['tcp_congestion_control']}; {text}"
    return f'<p class="quiet">{escape(text)} <a href="{figure.name}.csv">All rounds</a></p>'
