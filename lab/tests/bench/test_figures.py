"""The talks' figures: texts for canned rounds, the page and its data, the division of time, and one measured figure."""

import csv
import io
import json
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from netfold_lab.bench import mpi_peers
from netfold_lab.bench.figures import by_link, efficiency, hosts, latency, loss, packets, run, speedup, tree
from netfold_lab.bench.figures.budget import LEAST_ROUNDS, MOST_ROUNDS, Share
from netfold_lab.bench.figures.figure import (
    GLOO,
    HOSTS_ONLY,
    IN_NETWORK,
    RING,
    Figure,
    Measurements,
    describe_mpi,
    mpi_series,
)
from netfold_lab.bench.figures.replay import NETFOLD, fitting_rounds
from netfold_lab.bench.figures.run import FIGURES
from netfold_lab.bench.rack_runner import Timing
from netfold_lab.bench.runner import BenchError
from netfold_lab.cli.bench import app
from netfold_lab.rack.command import why_unavailable

LACK = why_unavailable(loss=False)
CIRCUMSTANCES = {
    "machine": {"cpu": "a processor", "cores": 2, "kernel": "6.0"},
    "versions": {"netfold": "0"},
    "tcp_congestion_control": "reno",
    "load": [0.5, 1.0],
    "seconds": 12,
    "date": "2020-01-01 00:00 UTC",
    "command": "netfold bench figures",
}
# Of the rounds' times, over their median.
NOISE = (0.99, 1.0, 1.0, 1.01)


def canned(settings: dict[str, object], times: dict[tuple[str, object], float], **more: object) -> Measurements:
    """Rounds that differ by a little, all backends alike, so that every ratio is exact."""
    rows = [
        {"series": series, "x": x, "round": number, "took_s": took_s * noise, "wrong": 0, "again": 3}
        for number, noise in enumerate(NOISE)
        for (series, x), took_s in times.items()
    ]
    return Measurements(settings, [{**row, **more} for row in rows], circumstances=dict(CIRCUMSTANCES))


def of_hosts(grown: float) -> Measurements:
    times: dict[tuple[str, object], float] = {(GLOO, 2): 0.35, (GLOO, 16): 0.7, (RING, 2): 0.35, (RING, 16): 0.65}
    times |= {(IN_NETWORK, 2): 0.35, (IN_NETWORK, 16): 0.35 * grown}
    return canned({"rate": "100mbit", "size_bytes": 4 << 20}, times)


def of_loss(ours: float, theirs: float) -> Measurements:
    times = {
        (backend, x): 0.4 * (at_most if x == "1%" else 1 + (at_most - 1) / 2 if x == "0.1%" else 1)
        for backend, at_most in ((IN_NETWORK, ours), ("gloo, TCP reno", theirs))
        for x in loss.LOSSES
    }
    return canned({"hosts": 4, "rate": "200mbit", "size_bytes": 8 << 20}, times)


def of_packets(slower: float) -> Measurements:
    """Of every payload as the headers have it, but the smallest on the quicker links `slower`."""
    sizes = {"200mbit": 4 << 20, "1gbit": 16 << 20}
    times = {
        (rate, payload): sizes[rate]
        * 8
        / bits
        * (payload + 90)
        / payload
        * (slower if payload == 512 and bits > 5e8 else 1)
        for rate, bits in (("200mbit", 2e8), ("1gbit", 1e9))
        for payload in packets.PAYLOADS
    }
    return canned({"hosts": 4, "mtu": 9000, "size_bytes": sizes}, times)


def of_wires(fixed: float) -> Measurements:
    factors = {"f32": 1.0, "bf16": 0.5, "f16": 0.5, "i32": fixed, "i8": 0.3, GLOO: 1.5}
    times = {(form, ""): 0.36 * factor for form, factor in factors.items()}
    taken = canned({"hosts": 4, "rate": "200mbit", "size_bytes": 8 << 20}, times)
    for row in taken.rows:
        row |= {"error": 1e-3, "sent_bytes": None if row["series"] == GLOO else 1000}
    return taken


def of_latency(ours: float) -> Measurements:
    backends = {IN_NETWORK: ours, HOSTS_ONLY: 1e-4, GLOO: 3e-4}
    times = {
        (f"{backend}, {size} B", count): took_s * count
        for backend, took_s in backends.items()
        for size in (8, 64)
        for count in (2, 4)
    }
    return canned({"rate": "1gbit", "sizes": [8, 64], "calls": 10}, times)


def of_tree(gloo: float) -> Measurements:
    times = {(tree.LEAVES, ""): 0.4, (tree.ROOT, ""): 1.6, (RING, ""): 0.7, (GLOO, ""): gloo}
    return canned({"hosts": 8, "racks": 2, "rate": "200mbit", "size_bytes": 8 << 20}, times)


def of_speedup(vgg: float) -> Measurements:
    """Steps of gloo over netfold's: of vgg16 `vgg`, of resnet50 1.3."""
    times: dict[tuple[str, object], float] = {(NETFOLD, "vgg16"): 0.4, (GLOO, "vgg16"): 0.4 * vgg}
    times |= {(NETFOLD, "resnet50"): 0.3, (GLOO, "resnet50"): 0.39}
    settings: dict[str, object] = {"hosts": 8, "rate": "200mbit", "shrink": 50, "stands_for": "10 Gbit/s"}
    return canned(settings, times, workers=8, compute_s=0.2)


def of_efficiency(ours: float) -> Measurements:
    """Computing over the step: among 8 hosts `ours` by netfold, 0.5 by gloo."""
    settings: dict[str, object] = {"rate": "250mbit", "stands_for": "2.5 Gbit/s"}
    few = canned(settings, {(NETFOLD, "edsr"): 0.2, (GLOO, "edsr"): 0.25}, workers=2, compute_s=0.2)
    many = canned(settings, {(NETFOLD, "edsr"): 0.2 / ours, (GLOO, "edsr"): 0.4}, workers=8, compute_s=0.2)
    return replace(few, rows=many.rows + few.rows)


# For each figure: rounds that reach the talk's numbers, rounds that do not, and the text for the latter.
KEPT_UP: dict[str, Measurements] = {
    "speedup": of_speedup(1.5),
    "hosts": of_hosts(1.0),
    "loss": of_loss(1.01, 3.0),
    "packets": of_packets(1.0),
    "wires": of_wires(1.0),
    "latency": of_latency(5e-5),
    "efficiency": of_efficiency(0.8),
    "tree": of_tree(0.7),
}
FELL_SHORT: dict[str, tuple[Measurements, str]] = {
    "speedup": (of_speedup(1.1), "Below the talk's range, 1.2 to 4.0: vgg16."),
    "hosts": (of_hosts(1.2), "Not flat: 16 hosts take 1.200 times as long as 2."),
    "loss": (of_loss(1.4, 1.1), "Not without impact: at 0.1% it takes 1.200 times as long."),
    "packets": (
        of_packets(1.25),
        "Below line rate on links of 1 Gbit/s, of the limit by headers: 80.0% with 128 values.",
    ),
    "wires": (of_wires(1.3), "Not unaffected: i32, the talk's fixed point, takes 1.30 times as long as f32."),
    "latency": (of_latency(2e-4), f"Slower than {HOSTS_ONLY} at 8 B among 2 hosts: 0.50 of its speed."),
    "efficiency": (of_efficiency(0.4), "edsr: no better than gloo with 8 hosts, 40% to 50%."),
    "tree": (of_tree(0.2), "Slower than gloo: 0.50 of its time."),
}


def test_every_figure_has_canned_rounds_here() -> None:
    assert list(FIGURES) == list(KEPT_UP) == list(FELL_SHORT)


@pytest.mark.parametrize("name", FIGURES)
def test_a_table_has_a_cell_a_column_and_the_medians_of_the_rounds(name: str) -> None:
    told = FIGURES[name].tell(KEPT_UP[name])
    assert told.table and all(len(row) == len(told.header) for row in told.table)
    assert "<svg" in told.picture and "xmlns" not in told.picture


def test_times_in_a_table_are_medians_with_their_spread_and_ratios_are_paired() -> None:
    told = hosts.tell(of_hosts(1.0))
    assert told.table[0] == ["2", *["350 (347 .. 353)"] * 3, "1.00 (1.00 .. 1.00)"]
    assert told.table[1][-1] == "2.00 (2.00 .. 2.00)"
    assert "16 hosts take 1.00 (1.00 .. 1.00) times as long as 2 through the switch" in told.measured


@pytest.mark.parametrize("name", FIGURES)
def test_only_results_below_the_talks_numbers_are_reported_as_shortfalls(name: str) -> None:
    taken, sentence = FELL_SHORT[name]
    assert any(said.startswith(sentence) for said in FIGURES[name].tell(taken).short)
    start = sentence[: len("Not flat")]
    assert not any(said.startswith(start) for said in FIGURES[name].tell(KEPT_UP[name]).short)


def test_the_page_has_every_text_of_a_figure(tmp_path: Path) -> None:
    taken = replace(KEPT_UP["hosts"], cut=["The time sufficed for 4 rounds of 30."])
    page = run.write(tmp_path, {"hosts": taken}).read_text()
    told = hosts.tell(taken)
    text = re.sub(r"<[^>]*>", "", page)
    cells = [cell for row in (told.header, *told.table) for cell in row]
    for said in (*cells, told.measured, *told.short, *taken.cut, hosts.FIGURE.title, "a processor", "TCP by reno"):
        assert said in text.replace("&#x27;", "'"), said
    assert told.picture in page and 'href="hosts.csv"' in page
    # Self-contained: what it draws with is in it.
    page = re.sub(r"<script>.*?</script>|http-equiv", "", page, flags=re.S)
    assert "http" not in page and "src=" not in page and "@import" not in page


@pytest.mark.parametrize("name", ["hosts", "speedup"])
def test_the_figure_also_shows_predictions_for_other_switch_links(name: str, tmp_path: Path) -> None:
    predicted = FIGURES[name].tell(KEPT_UP[name]).predicted
    assert predicted is not None and "<svg" in predicted.picture
    page = run.write(tmp_path, {name: KEPT_UP[name]}).read_text()
    assert predicted.picture in page and "Predicted, not measured:" in page
    for link in ("c = 1", "c = 2", "c = 4", "c = P"):
        assert link in predicted.text and any(cell.startswith(link) for cell in predicted.header)
    assert all(len(row) == len(predicted.header) for row in predicted.table)


def test_predicted_times_by_switch_link_equal_hand_counted_bytes() -> None:
    # 8 MB at 8 MB/s: a second with a port per worker. Of 8 hosts: 1.75 by a ring, 1.6 with c = 1, 1.27 with c = 4.
    found = by_link.by_hosts(8_000_000, [2, 8], rate_bytes_per_s=8e6)
    assert found.header == ["hosts", "c = 1, ms", "c = 2, ms", "c = 4, ms", "c = P, ms", "a ring alone, ms"]
    assert found.table[1] == ["8", "1600", "1474", "1273", "1000", "1750"]
    assert found.table[0] == ["2", *["1000"] * 5]


def test_a_faster_link_never_gains_less() -> None:
    for row in by_link.by_model(["vgg16", "resnet50"], 8).table:
        gained = [float(cell) for cell in row[1:]]
        assert gained == sorted(gained) and 1 <= gained[0] <= gained[-1] <= 1.75


def test_hostile_strings_stay_text(tmp_path: Path) -> None:
    bad = "<script>alert('$x^2$ &')</script>"
    named = of_tree(0.7)
    for row in named.rows:
        row["series"] = bad if row["series"] == RING else row["series"]
    named.circumstances = {**CIRCUMSTANCES, "machine": {**CIRCUMSTANCES["machine"], "cpu": bad}, "command": bad}  # type: ignore[dict-item]
    failed = Measurements(lack=bad, circumstances=dict(CIRCUMSTANCES))
    page = run.write(tmp_path, {"tree": replace(named, cut=[bad]), "hosts": failed}).read_text()
    assert "<script>alert" not in page
    assert page.count("&lt;script&gt;") >= 5


def test_data_are_read_back_as_they_were_and_a_csv_has_every_round(tmp_path: Path) -> None:
    run.write(tmp_path, KEPT_UP)
    assert run.read(tmp_path) == KEPT_UP
    rows = list(csv.DictReader(io.StringIO((tmp_path / "wires.csv").read_text())))
    assert len(rows) == len(KEPT_UP["wires"].rows)
    assert [float(row["took_s"]) for row in rows] == [row["took_s"] for row in KEPT_UP["wires"].rows]
    assert (rows[0]["series"], rows[0]["round"], rows[0]["error"]) == ("f32", "0", "0.001")


def test_redraw_makes_the_page_from_the_data_alone(tmp_path: Path) -> None:
    page = run.write(tmp_path, KEPT_UP)
    drawn, data = page.read_text(), (tmp_path / run.DATA).read_text()
    page.unlink()
    done = CliRunner().invoke(app, ["figures", str(tmp_path), "--redraw", "--output", "json"])
    assert done.exit_code == 0, done.stderr
    assert page.read_text() == drawn and (tmp_path / run.DATA).read_text() == data
    assert json.loads(done.stdout) == json.loads(data)


@pytest.mark.parametrize(
    "text", [None, "[]", "{", '{"format": 99, "figures": {}}', '{"format": 1, "figures": {"hosts": {"x": 1}}}']
)
def test_a_folder_without_figures_is_an_error_of_one_sentence(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / run.DATA).write_text(text)
    done = CliRunner().invoke(app, ["figures", str(tmp_path), "--redraw"])
    assert done.exit_code == 2
    assert done.stderr.startswith(f"netfold bench figures: {tmp_path / run.DATA} holds no figures: ")
    assert not (tmp_path / run.PAGE).exists()


def test_figures_are_listed_and_an_unknown_one_is_refused(tmp_path: Path) -> None:
    listed = CliRunner().invoke(app, ["figures", "--only", "list"])
    assert [line.split()[0] for line in listed.stdout.splitlines()] == list(FIGURES)
    refused = CliRunner().invoke(app, ["figures", str(tmp_path), "--only", "speed"])
    assert refused.exit_code == 2 and "figure 'speed' is not known; there are speedup" in refused.stderr


def test_without_root_no_file_changes_and_the_error_names_the_figures_that_need_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "why_unavailable", lambda *, loss: "a rack needs root")
    done = CliRunner().invoke(app, ["figures", str(tmp_path / "new"), "--only", "hosts", "--only", "loss"])
    assert done.exit_code == 2
    assert "a rack needs root; without it none of these can be measured: hosts, loss" in done.stderr
    assert not (tmp_path / "new").exists()


def staged(monkeypatch: pytest.MonkeyPatch, **measures: Callable[[Share, Measurements], None]) -> None:
    """Figures that measure nothing real."""
    for name, measure in measures.items():
        figure: Figure = replace(FIGURES[name], measure=measure)
        monkeypatch.setitem(FIGURES, name, figure)
    monkeypatch.setattr(run, "why_unavailable", lambda *, loss: None)


def take(name: str) -> Callable[[Share, Measurements], None]:
    def measure(share: Share, taken: Measurements) -> None:
        taken.settings |= KEPT_UP[name].settings
        taken.rows += KEPT_UP[name].rows
        taken.circumstances |= {"versions": {}, "tcp_congestion_control": "reno"}

    return measure


def test_a_failed_figure_is_reported_and_the_other_figures_are_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    def fail(share: Share, taken: Measurements) -> None:
        taken.rows.append({"series": "half a round"})
        raise BenchError("rank 3 <ended>")

    staged(monkeypatch, hosts=fail, tree=take("tree"))
    done = CliRunner().invoke(app, ["figures", str(tmp_path), "--only", "hosts", "--only", "tree"])
    assert done.exit_code == 1
    page = (tmp_path / run.PAGE).read_text()
    assert "Not measured: rank 3 &lt;ended&gt;" in page and page.count("<svg") == 1
    assert run.read(tmp_path)["hosts"].rows == []


def test_a_single_figure_has_the_same_time_limit_as_in_a_full_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares: list[float] = []

    def measure(share: Share, taken: Measurements) -> None:
        shares.append(share.left_s)
        take("tree")(share, taken)

    staged(monkeypatch, tree=measure)
    run.run_figures(tmp_path, ["tree"], lambda line: None, total_s=1000)
    part = FIGURES["tree"].weight / sum(figure.weight for figure in FIGURES.values())
    assert shares == [pytest.approx(1000 * part, rel=0.01)]


def test_wrong_elements_are_on_the_page_and_the_command_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    def measure(share: Share, taken: Measurements) -> None:
        take("tree")(share, taken)
        taken.rows[0] = {**taken.rows[0], "wrong": 7}

    staged(monkeypatch, tree=measure)
    done = CliRunner().invoke(app, ["figures", str(tmp_path), "--only", "tree"])
    assert done.exit_code == 1
    assert "7 elements were wrong." in (tmp_path / run.PAGE).read_text()


def test_a_signal_keeps_finished_measurements_and_older_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    def interrupted(share: Share, taken: Measurements) -> None:
        raise SystemExit(130)

    run.write(tmp_path, {"wires": KEPT_UP["wires"]})
    staged(monkeypatch, hosts=take("hosts"), tree=interrupted)
    done = CliRunner().invoke(app, ["figures", str(tmp_path), "--only", "hosts", "--only", "tree"])
    assert done.exit_code == 130
    kept = run.read(tmp_path)
    assert list(kept) == ["hosts", "wires"] and kept["wires"] == KEPT_UP["wires"]
    # One of wires, and of hosts what was measured and what is predicted.
    assert (tmp_path / run.PAGE).read_text().count("<svg") == 3


def test_wrong_elements_of_the_warm_up_round_count() -> None:
    taken = Measurements()
    for number in (-1, 0):
        taken.add(GLOO, 2, number, Timing([0.5, 0.1, 0.2], wrong=3, again=0, sent_bytes=None, error=None))
    assert taken.wrong == 6
    assert [(row["round"], row["took_s"]) for row in taken.rows] == [(0, 0.2)]


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_unused_time_of_a_figure_goes_to_the_later_figures() -> None:
    clock = Clock()
    left = []
    for share, used_s in zip(Share(100, clock).split([1, 2, 1]), (10, 80, 0), strict=True):
        left.append(share.left_s)
        clock.now_s += used_s
    assert left == [25, 60, 10]


def test_the_remaining_time_is_never_below_zero() -> None:
    clock = Clock()
    shares = Share(100, clock).split([1, 1])
    next(shares)
    clock.now_s += 500
    assert next(shares).left_s == 0


def test_no_round_starts_that_would_pass_the_deadline() -> None:
    clock = Clock()
    share = Share(35, clock)
    played = []
    for number in share.rounds():
        played.append(number)
        clock.now_s += 6 if number != 1 else 8
    # One to warm up, then four: 32 s; another might take 8.
    assert played == [-1, 0, 1, 2, 3] and share.rounds_played == 4


def test_the_minimum_of_rounds_runs_even_past_the_deadline() -> None:
    clock = Clock()
    share = Share(1, clock)
    for _ in share.rounds():
        clock.now_s += 10
    assert share.rounds_played == LEAST_ROUNDS


def test_at_most_the_planned_rounds_run() -> None:
    share = Share(1e9, Clock())
    assert list(share.rounds(most=4)) == [-1, 0, 1, 2, 3]


def test_unused_time_of_one_part_goes_to_the_next_part() -> None:
    clock = Clock()
    left = []
    for part in Share(90, clock).split([1, 1, 1]):
        left.append(part.left_s)
        clock.now_s += 10
    assert left == [30, 40, 70]


def test_efficiency_is_computing_time_over_step_time() -> None:
    told = efficiency.tell(of_efficiency(0.8))
    assert [row[:2] for row in told.table] == [["edsr", "2"], ["edsr", "8"]]
    assert [cell.split(" ")[0] for cell in told.table[1][2:]] == ["80.0%", "50.0%"]
    worse = efficiency.tell(of_efficiency(0.6)).short
    assert worse[0] == "edsr: 60% with 8 hosts is not above the efficiency of the talk's default at scale."


def with_mpi(taken: Measurements, slower: float) -> Measurements:
    """An MPI's rounds too, each so many times as long as gloo's."""
    ours = [row for row in taken.rows if row["series"].startswith(GLOO)]
    rows = [
        {**row, "series": row["series"].replace(GLOO, "MPI (mpich)"), "took_s": row["took_s"] * slower} for row in ours
    ]
    return replace(taken, rows=taken.rows + rows, settings={**taken.settings, "mpi": "mpich"})


@pytest.mark.parametrize(("name", "ratio"), [("hosts", "4.00"), ("latency", "12.00")])
def test_an_mpi_adds_a_line_a_column_and_a_column_of_ratios(name: str, ratio: str) -> None:
    told = FIGURES[name].tell(with_mpi(KEPT_UP[name], 2.0))
    assert all(len(row) == len(told.header) for row in told.table)
    assert told.header[-1] == "MPI (mpich) / in the network" and "MPI (mpich)" in told.picture
    assert told.table[-1][-1].startswith(ratio)
    assert not any("no MPI here" in text for text in told.short)
    without = FIGURES[name].tell(KEPT_UP[name])
    assert "MPI" not in without.picture + " ".join(without.header)
    assert "There is no MPI here to compare with (make bench-peers)." in without.short


def test_the_note_on_busy_waiting_mpis_appears_only_with_more_hosts_than_cores() -> None:
    taken = with_mpi(of_latency(5e-5), 1.0)
    assert "spin while they wait. Among 4, 16 hosts, more than the 2 cores," in describe_mpi(taken, [2, 4, 16])
    taken.circumstances = {**CIRCUMSTANCES, "machine": {"cores": 16}}
    assert describe_mpi(taken, [2, 4, 16]).endswith("each on its own core.")


def test_the_page_reports_where_an_mpi_is_faster() -> None:
    short = latency.tell(with_mpi(of_latency(5e-5), 0.1)).short
    assert "Slower than MPI (mpich) at 8 B among 2 hosts: 0.60 of its speed." in short


def test_a_figure_uses_the_first_installed_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    here = {"openmpi", "intel"}
    monkeypatch.setattr(mpi_peers, "have_peer", here.__contains__)
    assert mpi_peers.find_mpi() == "openmpi"
    assert [mpi_peers.with_mpi_named(backend) for backend in ("mpi", "gloo", "mpi:intel")] == [
        "mpi:openmpi",
        "gloo",
        "mpi:intel",
    ]
    here.clear()
    assert mpi_peers.find_mpi() == ""
    with pytest.raises(mpi_peers.PeerMissingError, match="no MPI is installed; `make bench-peers`"):
        mpi_peers.with_mpi_named("mpi")


def test_models_are_sorted_by_speedup() -> None:
    assert [row[0] for row in speedup.tell(of_speedup(1.5)).table] == ["vgg16", "resnet50"]
    assert [row[0] for row in speedup.tell(of_speedup(1.1)).table] == ["resnet50", "vgg16"]


def test_the_number_of_replayed_steps_fits_the_time_and_has_a_minimum() -> None:
    # 2 backends, 0.5 s per step, 1.6 times as long with transfers: 40 s hold 25, of which 5 are no rounds.
    assert fitting_rounds(40, 0.5) == 20
    assert fitting_rounds(0, 0.5) == fitting_rounds(-3, 0.5) == LEAST_ROUNDS
    assert fitting_rounds(1e6, 0.5) == MOST_ROUNDS


@pytest.mark.rack
@pytest.mark.torch
@pytest.mark.skipif(LACK is not None, reason=str(LACK))
def test_a_figure_measured_in_a_rack_is_correct_in_every_element_and_is_drawn() -> None:
    taken = Measurements(circumstances=dict(CIRCUMSTANCES))
    hosts.measure(Share(0, time.monotonic), taken, counts=(2, 3), size_bytes=64 << 10)
    assert taken.wrong == 0
    assert len(taken.rows) == LEAST_ROUNDS * (len(hosts.OPTIONS) + len(mpi_series(taken))) * 2
    assert len(mpi_series(taken)) == bool(mpi_peers.find_mpi())
    assert all(row["took_s"] > 0 for row in taken.rows)
    assert taken.cut == ["The time sufficed for 3 rounds of 30."]
    assert len(hosts.tell(taken).table) == 2
