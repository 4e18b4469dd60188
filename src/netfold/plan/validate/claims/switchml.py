"""The talk on in-network aggregation with SwitchML (Microsoft, KAUST, Barefoot, UW)."""

from __future__ import annotations

from netfold.plan.cluster import load_cluster
from netfold.plan.model.catalogue import SWITCHML_MODELS, find_model
from netfold.plan.step import FITTED
from netfold.plan.step.traffic import Group, collective_s
from netfold.plan.validate.claims.by_link import LINKS, in_the_place_of_switches, name_of, said_of
from netfold.plan.validate.claims.claim import NEAR, Claim, ClaimJob, near

_TALK = "seeds/003, SwitchML"
# Percent.
_LEAST, _GREATEST = 20.0, 300.0
_WORKERS = 8
# 100 MB, as the talk's figures of aggregation have them, and the workers of its testbed.
_TENSOR_BYTES, _FEW, _MANY = 100e6, 4, 16
# What a ring sends over what a switch needs: 2 (P-1)/P.
_MOST = 2 * (_WORKERS - 1) / _WORKERS
_SLOWER = (
    f"a ring of {_WORKERS} sends {_MOST:.2f} times what a switch needs, so a switch gains {_MOST:.2f}x at most over a "
    "ring that fills its line; beyond that a baseline is slower, and the talk does not say how fast its own was"
)


def claim_job(name: str, cluster: str, workers: int = _WORKERS) -> ClaimJob:
    """One of the talk's models, with as many samples a worker as its published speed is of."""
    batch = find_model(name).speed.batch
    job = {"precision": "f32", "optimizer": "momentum", "overlap": True}
    return ClaimJob(f"{name}:measured=true", cluster, workers, workers * batch, job, {"micro_batch": batch})


def claims() -> list[Claim]:
    slow, fast = (
        {name: _gain(name, cluster) for name in SWITCHML_MODELS} for cluster in ("switchml-10g", "switchml-100g")
    )
    least, most = min(slow, key=slow.__getitem__), max(slow, key=slow.__getitem__)
    words = "SwitchML provides a speedup from 20% to 300% compared to Tensorflow/NCCL"
    return [
        Claim(
            "SwitchML, the model that gains least",
            _TALK,
            words,
            _LEAST,
            slow[least],
            "%",
            *near(_LEAST),
            claim_job(least, "switchml-10g").text + "; with reductions in the network, and without",
            f"{_hidden(slow)} of nine models hide most of a ring at 10 Gbit/s beside computing, {_hidden(fast)} at "
            "100 Gbit/s; with a baseline that hides less, or is slower than its line, a switch gains more; "
            + said_of(claim_job(least, "switchml-10g")),
        ),
        Claim(
            "SwitchML, the model that gains most",
            _TALK,
            words,
            _GREATEST,
            slow[most],
            "%",
            *near(_GREATEST),
            claim_job(most, "switchml-10g").text + "; with reductions in the network, and without",
            f"{_SLOWER}; {said_of(claim_job(most, 'switchml-10g'))}",
        ),
        _flat(),
    ]


def _hidden(gains: dict[str, float]) -> int:
    """Models below the least gain that the talk names."""
    return sum(gain < _LEAST for gain in gains.values())


def _gain(name: str, cluster: str) -> float:
    """Percent."""
    asked = claim_job(name, cluster)
    ring, switch = (asked.best(in_network=word).prediction.samples_per_s for word in (False, True))
    return 100 * (switch / ring - 1)


def _flat() -> Claim:
    switch, ring = (
        [
            collective_s("all_reduce", _TENSOR_BYTES, Group(workers), load_cluster("switchml-10g"), FITTED, word)
            for workers in (_FEW, _MANY)
        ]
        for word in (True, False)
    )
    return Claim(
        "SwitchML, scaling in workers",
        _TALK,
        "SwitchML performance does not depend on the number of workers",
        1.0,
        switch[1] / switch[0],
        "x",
        1 - NEAR,
        1 + NEAR,
        f"all_reduce of {_TENSOR_BYTES / 1e6:.0f} MB on switchml-10g, {_MANY} workers against {_FEW}",
        f"a ring takes {ring[1] / ring[0]:.2f}x as long; a host in the switch's place, and a ring for the rest, "
        + ", ".join(f"{_grown(c):.2f}x with {name_of(c)}" for c in LINKS),
    )


def _grown(c: int | None) -> float:
    """Of a host behind a link of c, the time among many workers over that among few."""
    cluster = in_the_place_of_switches(load_cluster("switchml-10g"), c)
    few, many = (
        collective_s("all_reduce", _TENSOR_BYTES, Group(workers), cluster, FITTED, True, alongside=1)
        for workers in (_FEW, _MANY)
    )
    return many / few
