"""The talk on libfabric and EFA (AWS, OFA workshop 2020)."""

from __future__ import annotations

from dataclasses import replace

from netfold.plan.cluster import Cluster
from netfold.plan.scaling_curve import scaling_curve
from netfold.plan.step import predict
from netfold.plan.validate.claims.claim import Claim, ClaimJob, near

_TALK = "seeds/000, AWS, libfabric and EFA, 2020"
# NVIDIA's BERT, which the talk names (DeepLearningExamples, PyTorch): 65,536 sequences of 128 a step, gradients of 16
# bits added up over microbatches, and reduced once after the last.
_BERT = ClaimJob("bert-large:sequence=128", "p3dn-efa", 256, 65536, {"precision": "f16", "gradient_bytes": 2})
_ONE_NODE = 8
# As many servers as make an hour of nine days, at the efficiency that the talk names.
_NINE_DAYS = 2048
# Of a node, by NCCL 2.4.6 over TCP on the same machines (github.com/NVIDIA/nccl/issues/209).
_OLD_TCP_BYTES_PER_S = 10.7e9 / 8


def claims() -> list[Claim]:
    return [_over_tcp(), _efficiency(), _mask_rcnn()]


def _over_tcp() -> Claim:
    asked = replace(_BERT, cluster="p3dn-tcp")
    cluster, model = asked.request().cluster, asked.request().model
    rate = cluster.tiers[1].bytes_per_s * cluster.node
    slower = predict(model, _slower_tcp(cluster), asked.best().job).step_s / _BERT.best().prediction.step_s
    microbatches = _BERT.best().job.microbatches
    fewer = _BERT.batch // 4
    low, high = near(2.0, 1.0)
    return Claim(
        "EFA over TCP, BERT",
        _TALK,
        "EFA improves training time by 2X for a cluster of 256 GPUs vs TCP",
        2.0,
        _gain(_BERT.batch),
        "x",
        low,
        high,
        f"{_BERT.text}; and on p3dn-tcp",
        f"gradients are reduced once in {microbatches} microbatches, and TCP keeps up {rate / 1e9:.1f} GB/s a node "
        f"with NCCL 2.4.8; with the {_OLD_TCP_BYTES_PER_S / 1e9:.1f} GB/s of NCCL 2.4.6 it is {slower:.1f}x, with "
        f"{fewer:,} sequences a step {_gain(fewer):.1f}x, and the talk names neither version nor batch",
    )


def _gain(batch: int) -> float:
    efa, tcp = (replace(_BERT, cluster=name, batch=batch).best().prediction.step_s for name in ("p3dn-efa", "p3dn-tcp"))
    return tcp / efa


def _slower_tcp(cluster: Cluster) -> Cluster:
    inside, outside = cluster.tiers
    return replace(cluster, tiers=(inside, replace(outside, bytes_per_s=_OLD_TCP_BYTES_PER_S / cluster.node)))


def _efficiency() -> Claim:
    strong, weak = (_scaled(scaling) for scaling in ("strong", "weak"))
    low, high = near(87.0, 100.0)
    return Claim(
        "BERT's scaling efficiency",
        _TALK,
        "Throughput Scaling efficiency: 87% - Scale training time from 9 days to <1 hour",
        87.0,
        strong[256],
        "%",
        low,
        high,
        f"{_BERT.text}; against {_ONE_NODE} devices with the same batch",
        f"from nine days to an hour it takes about {_NINE_DAYS:,} devices: there it is {strong[_NINE_DAYS]:.0f}% where "
        f"the batch stays, and {weak[_NINE_DAYS]:.0f}% where it grows with them",
    )


def _scaled(scaling: str) -> dict[int, float]:
    asked = _BERT.request()
    points = scaling_curve(
        asked.model,
        asked.cluster,
        asked.job,
        asked.space,
        devices=asked.devices,
        sizes=(_ONE_NODE, asked.devices, _NINE_DAYS),
        scaling=scaling,
    )
    return {point.devices: 100 * point.efficiency for point in points}


def _mask_rcnn() -> Claim:
    asked = ClaimJob(
        "mask-rcnn:measured=true",
        "p3dn-efa",
        192,
        4 * 192,
        {"precision": "f32", "optimizer": "momentum", "overlap": True},
        {"micro_batch": 4},
    )
    efa, tcp = (replace(asked, cluster=name).best().prediction.samples_per_s for name in ("p3dn-efa", "p3dn-tcp"))
    return Claim(
        "Mask R-CNN on 192",
        _TALK,
        "EFA outperformed TCP at all scales, processing >1000 images/second with 192 GPUs",
        1000.0,
        efa,
        "img/s",
        1000.0,
        float("inf"),
        asked.text,
        f"{efa / tcp:.2f}x what TCP gives: gradients hide beside a step in f32",
    )
