"""Every figure there is, in the page's order. A new one is a file and a line here."""

from netfold.bench.figures import efficiency, hosts, latency, loss, packets, speedup, tree, wires
from netfold.bench.figures.figure import Figure

FIGURES: dict[str, Figure] = {
    module.FIGURE.name: module.FIGURE for module in (speedup, hosts, loss, packets, wires, latency, efficiency, tree)
}
