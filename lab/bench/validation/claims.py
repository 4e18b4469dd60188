"""The headline claims of five talks (data/claims.toml), each beside what the planner predicts for the same question.

A question is a preset cluster, a model by name and a split. No constant is fitted to a claim. A talk is one function.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import inf
from typing import Any

from netfold.tuning import DEFAULT_LINKS, Link, Topology
from netfold.tuning.cost import predict as predict_operation
from netfold_plan.cluster import Cluster, load_cluster
from netfold_plan.job import Job, Split
from netfold_plan.model import Chain, ChainLayer, Product
from netfold_plan.model.catalogue import SWITCHML_MODELS
from netfold_plan.request import Request, parse_request, read_job
from netfold_plan.step import FITTED, Prediction, predict
from netfold_plan.step.traffic import Group, collective_s
from netfold_plan.variants.link_gains import LINKS, best_choice, gains, measured_request, name_of, with_host_aggregators
from netfold_plan.variants.scaling_curve import scaling_curve
from validation.sources import DATA, SOURCES

# A prediction agrees if it differs by at most this part of the gain or loss that the talk names.
NEAR = 0.2
_OVERLAPPED = {"optimizer": "momentum", "overlap": True}


@dataclass(frozen=True)
class Finding:
    """A prediction for one claim.

    asked: the question. why: the reason of a disagreement, or the prediction's conditions.
    """

    predicted: float
    asked: str
    why: str = ""


@dataclass(frozen=True)
class Claim:
    """words: the talk's own text. said: its number; None where the talk has no number. unit: of both numbers.

    low, high: the predictions that agree with the talk; infinite where the talk states only a bound.
    """

    name: str
    talk: str
    words: str
    said: float | None
    unit: str
    low: float
    high: float
    finding: Finding

    @property
    def agrees(self) -> bool:
        return self.low <= self.finding.predicted <= self.high


@dataclass(frozen=True)
class Question:
    """A data-parallel job by the keys of a job's file (docs/reference/plan/index.md); `split` may fix
    more degrees of the parallel split."""

    model: str
    cluster: str
    gpus: int
    batch: int
    job: Mapping[str, Any]
    split: Mapping[str, Any] = field(default_factory=dict)

    def request(self) -> Request:
        split = {"tensor": 1, "pipeline": 1, "zero": 0, "recompute": "none"} | dict(self.split)
        job = {"gpus": self.gpus, "batch": self.batch} | dict(self.job)
        return parse_request({"model": self.model, "cluster": self.cluster, "job": job, "split": split}, {})

    def best(self, **job: Any) -> Prediction:
        """The prediction of the fastest split. job: keys in place of the question's own."""
        return best_choice(replace(self, job={**self.job, **job}).request()).prediction

    def text(self) -> str:
        keys = ", ".join(f"{key}={str(value).lower()}" for key, value in {**self.job, **self.split}.items())
        devices = f"data parallel over {self.gpus:,} devices" if self.gpus > 1 else "one device"
        return f"{self.model} on {self.cluster}, {devices}, batch {self.batch:,}; {keys}"


@cache
def claims() -> tuple[Claim, ...]:
    tree, _ = read_job(DATA / "claims.toml")
    found = []
    talks = {"efa": _efa, "sharp": _sharp, "nvidia": _nvidia, "switchml": _switchml, "edsr": _edsr}
    for talk, findings in talks.items():
        for claim, finding in zip(tree[talk]["claims"], findings(), strict=True):
            said = claim.get("said")
            if "bound" in claim:
                band = claim["bound"], inf
            else:
                band = around(said, claim.get("nothing", 0.0), claim.get("digits"))
            found.append(Claim(claim["name"], tree[talk]["talk"], claim["words"], said, claim["unit"], *band, finding))
    return tuple(found)


def around(said: float, nothing: float = 0.0, digits: float | None = None) -> tuple[float, float]:
    """The predictions that agree with a number. nothing: the number that would be no gain, or no loss."""
    off = NEAR * abs(said - nothing) if digits is None else digits
    return said - off, said + off


def _efa() -> list[Finding]:
    """AWS, OFA workshop 2020: libfabric and EFA."""
    # The talk names NVIDIA's BERT (DeepLearningExamples, PyTorch): 65,536 sequences of 128 per step, gradients of 16
    # bits accumulated over microbatches and reduced once after the last.
    bert = Question("bert-large:sequence=128", "p3dn-efa", 256, 65536, {"precision": "f16", "gradient_bytes": 2})
    tcp = replace(bert, cluster="p3dn-tcp").request()
    # Per node, by NCCL 2.4.6 over TCP on the same machines (github.com/NVIDIA/nccl/issues/209).
    old_bytes_per_s = 10.7e9 / 8
    inside, outside = tcp.cluster.tiers
    slower = replace(tcp.cluster, tiers=(inside, replace(outside, bytes_per_s=old_bytes_per_s / tcp.cluster.node)))
    job = best_choice(tcp).job
    slower_gain = predict(tcp.model, slower, job).step_s / bert.best().step_s

    def over_tcp(question: Question) -> float:
        return replace(question, cluster="p3dn-tcp").best().step_s / question.best().step_s

    # At the efficiency that the talk names, this many devices turn nine days into one hour.
    asked, nine_days = bert.request(), 2048
    strong, weak = (
        [
            100 * point.efficiency
            for point in scaling_curve(
                *(asked.model, asked.cluster, asked.job, asked.space),
                devices=asked.devices,
                sizes=(8, asked.devices, nine_days),
                scaling=scaling,
            )
        ]
        for scaling in ("strong", "weak")
    )
    mask_job = {"precision": "f32", **_OVERLAPPED}
    mask = Question("mask-rcnn:measured=true", "p3dn-efa", 192, 4 * 192, mask_job, {"micro_batch": 4})
    fewer = bert.batch // 4
    return [
        Finding(
            over_tcp(bert),
            f"{bert.text()}; and on p3dn-tcp",
            f"gradients are reduced once per {job.microbatches} microbatches, and TCP sustains "
            f"{outside.bytes_per_s * tcp.cluster.node / 1e9:.1f} GB/s per node with NCCL 2.4.8. With the "
            f"{old_bytes_per_s / 1e9:.1f} GB/s of NCCL 2.4.6 it is {slower_gain:.1f}x, with {fewer:,} sequences per "
            f"step {over_tcp(replace(bert, batch=fewer)):.1f}x. The talk names neither version nor batch",
        ),
        Finding(
            strong[1],
            f"{bert.text()}; against 8 devices with the same batch",
            f"nine days become one hour on about {nine_days:,} devices. There it is {strong[2]:.0f}% with the same "
            f"batch, and {weak[2]:.0f}% with a batch that grows with the devices",
        ),
        Finding(
            mask.best().samples_per_s,
            mask.text(),
            f"{over_tcp(mask):.2f}x the throughput over TCP: a step in f32 hides the gradients",
        ),
    ]


def _sharp() -> list[Finding]:
    """Mellanox, ChipEx 2019: in-network computing with SHARP."""
    job = {"precision": "f16", **_OVERLAPPED}
    resnet = Question("resnet50", "sharp-hdr", 128, 128 * 256, job, {"micro_batch": 256})

    def gain(**job: Any) -> float:
        """By how many percent reductions in the network raise the throughput."""
        with_it, without = (resnet.best(in_network=way, **job).samples_per_s for way in (True, False))
        return 100 * (with_it / without - 1)

    ring = resnet.best(overlap=False, in_network=False)
    tier, size, nodes, ranks_a_node = load_cluster("sharp-hdr").tiers[0], 8, 1500, 40
    few = tier.switch_ports

    def small_us(nodes: int, *, switch: bool) -> float:
        """Microseconds: shared memory inside a node, the best algorithm between one rank of each node."""
        network = Link(tier.up_latency_s(nodes) if switch else tier.latency_s, tier.bytes_per_s)
        links = replace(DEFAULT_LINKS, network=network, switches=(tier.bytes_per_s,))
        ranks = Topology.even(nodes * ranks_a_node, nodes)
        return 1e6 * predict_operation("all_reduce", "hierarchical", size, ranks, links, switch=int(switch))

    with_few, with_many = (small_us(each, switch=True) for each in (few, nodes))
    without_few, without_many = (small_us(each, switch=False) for each in (few, nodes))
    return [
        Finding(
            gain(),
            f"{resnet.text()}; with reductions in the network, and without",
            f"a ring at HDR's rate takes {100 * ring.exposed_s['data'] / ring.step_s:.0f}% of a step. Where nothing "
            f"hides it, a switch gains {gain(overlap=False):.1f}%. For 16% the reductions must have been far from line "
            f"rate before; the talk does not say how fast they were. {_host_gains(resnet.request())}",
        ),
        Finding(
            with_many / with_few,
            f"all_reduce of {size} bytes over {nodes * ranks_a_node:,} ranks on {nodes:,} nodes of sharp-hdr, against "
            f"{few * ranks_a_node:,} ranks below one switch",
            f"{with_few:.1f} to {with_many:.1f} us, through {tier.switch_levels(nodes)} levels of switches with {few} "
            f"ports; without them {without_few:.0f} to {without_many:.0f} us. The talk shows a flat curve and names no "
            "time",
        ),
    ]


def _nvidia() -> list[Finding]:
    """NVIDIA, Hot Chips 2020: scaling out training."""

    def idle(stages: int, microbatches: int) -> Finding:
        layer = ChainLayer("layer", (Product(4096, 4096, 4096),), 4096 * 4096, changed=0.0, kept=1.0, handed=1.0)
        model, job = Chain("equal layers", (layer,) * stages), Job(microbatches, 1, Split(pipeline=stages))
        found = predict(model, load_cluster("dgx-a100"), job)
        counted = f"{stages} stages, {microbatches} microbatch{'es' if microbatches > 1 else ''}"
        predicted = 100 * found.bubble_s / (found.bubble_s + found.compute_s)
        return Finding(predicted, f"equal layers on dgx-a100, {counted}")

    # Microbatches of 4 on fewer devices, too: a larger one would fit with a sharded
    # optimizer state, but not with a whole one.
    job = {"precision": "f16", "overlap": True}
    updated = Question("bert-large:sequence=128", "dgx-a100", 1024, 4096, job, {"micro_batch": 4})
    steps = {
        gpus: [replace(updated, gpus=gpus, split={**updated.split, "zero": zero}).best() for zero in (0, 1)]
        for gpus in (8, 128, updated.gpus)
    }
    gain = {gpus: whole.step_s / part.step_s for gpus, (whole, part) in steps.items()}
    whole, part = steps[updated.gpus]
    resnet = Question("resnet50", "dgx-1", 1, 256, {"precision": "f16", "optimizer": "momentum"}, {"micro_batch": 256})
    memory = resnet.best().memory
    # 256 stages show the limits "as N grows".
    return [
        idle(3, 1),
        idle(256, 256),
        idle(256, 4 * 256),
        Finding(
            gain[updated.gpus],
            f"{updated.text()}; ZeRO-1 against none",
            ", ".join(f"{each:.2f}x on {gpus:,}" for gpus, each in gain.items())
            + f". The last update takes {1e3 * (whole.optimizer_s - part.optimizer_s):.1f} ms less. Gathering the "
            f"updated weights takes {1e3 * (part.exposed_s['data'] - whole.exposed_s['data']):.1f} ms more, and "
            "nothing hides it. The talk has no number: it says that the update stays as long while everything else "
            "shrinks, and not what hides the gather",
        ),
        Finding(
            memory.total / 1e9,
            resnet.text(),
            f"{memory.activations / 1e9:.1f} GB of activations, {(memory.total - memory.activations) / 1e9:.1f} of "
            "weights, gradients and state. A framework's context, the workspace of convolutions and the gaps of the "
            "allocator are not counted; the talk does not say what its other 3 GB are",
        ),
        Finding(
            memory.activations / 1e9,
            resnet.text(),
            "outputs of convolutions and norms; torch keeps 11.2 GB for the same backward pass",
        ),
    ]


def _switchml() -> list[Finding]:
    """Microsoft, KAUST, Barefoot, UW: in-network aggregation with SwitchML."""
    workers, cluster = 8, load_cluster("switchml-10g")
    # 100 MB, as in the talk's figures of aggregation, and the workers of its testbed.
    size, few, many = 100e6, 4, 16

    def gain(name: str, cluster: str) -> float:
        """Percent."""
        asked = measured_request(name, cluster, workers)
        switch, ring = (best_choice(asked, in_network=way).prediction.samples_per_s for way in (True, False))
        return 100 * (switch / ring - 1)

    def finding(name: str, why: str) -> Finding:
        asked = measured_request(name, "switchml-10g", workers)
        job = {"precision": "f32", **_OVERLAPPED}
        batch = asked.job.global_batch
        split = {"micro_batch": batch // workers}
        text = Question(f"{name}:measured=true", "switchml-10g", workers, batch, job, split).text()
        said = f"{text}; with reductions in the network, and without"
        return Finding(slow[name], said, f"{why} {_host_gains(asked)}")

    def growth(cluster: Cluster, in_network: bool, alongside: int = 0) -> float:
        """The time among many workers over the time among few."""
        times = [
            collective_s("all_reduce", size, Group(count), cluster, FITTED, in_network, alongside=alongside)
            for count in (few, many)
        ]
        return times[1] / times[0]

    slow, fast = ({name: gain(name, at) for name in SWITCHML_MODELS} for at in ("switchml-10g", "switchml-100g"))
    hidden_slow, hidden_fast = (sum(each < 20 for each in found.values()) for found in (slow, fast))
    ratio = 2 * (workers - 1) / workers
    hosts = ", ".join(f"{growth(with_host_aggregators(cluster, c), True, 1):.2f}x with {name_of(c)}" for c in LINKS)
    return [
        finding(
            min(slow, key=slow.__getitem__),
            f"{hidden_slow} of nine models hide most of a ring behind computing at 10 Gbit/s, {hidden_fast} at 100 "
            "Gbit/s. A switch gains more over a baseline that hides less, or that is slower than its line.",
        ),
        finding(
            max(slow, key=slow.__getitem__),
            f"a ring of {workers} sends {ratio:.2f} times what a switch needs, so a switch gains at most {ratio:.2f}x "
            "over a ring that fills its line. A larger gain needs a slower baseline; the talk does not say how fast "
            "its own was.",
        ),
        Finding(
            growth(cluster, True),
            f"all_reduce of {size / 1e6:.0f} MB on switchml-10g, {many} workers against {few}",
            f"a ring takes {growth(cluster, False):.2f}x as long; a host in place of the switch, with a ring for the "
            f"rest, {hosts}",
        ),
    ]


def _edsr() -> list[Finding]:
    """EDSR with MVAPICH2-GDR and Horovod."""
    (source,) = (each for each in SOURCES if each.name.startswith("EDSR"))
    cases = {tuple(case.name.rsplit(", ", 1)): case for case in source.compare()}
    default, tuned = "DP MPI default", "DP MPI-Opt (CUDA IPC+regcache)"
    gain = {
        ranks: 100 * (cases[tuned, ranks].predicted / cases[default, ranks].predicted - 1) for ranks in ("256", "512")
    }
    errors = " and ".join(f"{100 * cases[library, '512'].error:+.0f}%" for library in (default, tuned))
    return [
        Finding(
            gain["512"],
            "the throughput of each library on 512 GPUs from its own rows of 1 to 16 GPUs (`fit_law` in sources.py)",
            f"the gain is the difference of two predictions with errors of {errors}; on 256 GPUs it is "
            f"{gain['256']:.0f}% where the talk has 30.41%",
        )
    ]


def _host_gains(request: Request) -> str:
    """`A host in place of the switch gains 6.0%, 12.1%, 23.4% and 64.0% with c = 1, c = 2, c = 4 and c = P`."""
    found = gains(request)

    def listed(each: Sequence[str]) -> str:
        return f"{', '.join(each[:-1])} and {each[-1]}"

    percents = listed([f"{100 * (gain - 1):.1f}%" for gain in found.values()])
    return f"A host in place of the switch gains {percents} with {listed([name_of(c) for c in found])}"


def claims_markdown(found: Sequence[Claim]) -> str:
    """One row per claim, then the question and the comment of each."""
    near = f"{100 * NEAR:.0f}%"
    lines = [
        "## The talks' claims",
        "",
        f"{sum(claim.agrees for claim in found)} of {len(found)} predictions agree with the talk: a gain or a loss",
        f"within {near}, a flat curve within {near}, a bound kept, idle slots equal in the talk's digits. Nothing was",
        "fitted to the claims.",
        "",
        "| claim | the talk | predicted | agrees | |",
        "|---|---:|---:|---|---|",
    ]
    for claim in found:
        said, low, high, predicted = (
            "no number" if value is None else _quantity(value, claim.unit)
            for value in (claim.said, claim.low, claim.high, claim.finding.predicted)
        )
        bound = claim.high == inf
        said = f"> {said}" if bound and claim.said is not None else said
        band = f"above {low}" if bound else f"from {low} to {high}"
        lines.append(f"| {claim.name} | {said} | {predicted} | {band} | {'yes' if claim.agrees else 'no'} |")
    lines.append("")
    for claim in found:
        asked, why = claim.finding.asked, claim.finding.why
        why = f" {why[0].upper()}{why[1:]}." if why else ""
        lines.append(f'- **{claim.name}** ({claim.talk}): "{claim.words}". Asked: {asked}.{why}')
    return "\n".join(lines) + "\n"


def _quantity(value: float, unit: str) -> str:
    shown = f"{value:.0f}" if value >= 1000 else f"{value:.3g}"
    return shown + unit if unit in ("%", "x") else f"{shown} {unit}"
