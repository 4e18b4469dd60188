"""Every figure there is, in the page's order. A new one is a file and a line here."""

from netfold.bench.figures import hosts, latency, loss, packets, tree, wires
from netfold.bench.figures.figure import Figure

FIGURES: dict[str, Figure] = {
    module.FIGURE.name: module.FIGURE for module in (hosts, loss, packets, wires, latency, tree)
}
