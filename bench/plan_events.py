"""How long a step of 10,240 ranks takes to play as events, folded and rank by rank:

    .venv/bin/python bench/plan_events.py [ROUNDS]      # 3

Processor time of one thread; the least of the rounds, as whatever else the machine does only adds to it. Writes
bench/results/plan_events.md.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path

from netfold.bench.machine import spoken
from netfold.plan.cluster import Cluster, load_cluster
from netfold.plan.events import IDEAL, Conditions, simulate
from netfold.plan.job import Job, Split
from netfold.plan.model import Transformer

RESULT = Path(__file__).parent / "results" / "plan_events.md"
RANKS = 10_240
# Parameters: 117 billion.
MODEL = Transformer("GPT", 12288, 96, 64, 2048)
MICROBATCHES = 32
# tensor, pipeline, pieces a stage.
SPLITS = ((8, 16, 1), (8, 32, 1), (8, 16, 4), (4, 16, 1))
CONDITIONS = {
    "calm": IDEAL,
    "links shared": Conditions(),
    "links shared, jitter, a straggler": Conditions(jitter=0.05, stragglers={4321: 1.2}),
}


def job(tensor: int, pipeline: int, pieces: int) -> Job:
    data = RANKS // tensor // pipeline
    return Job(
        MICROBATCHES * data,
        1,
        Split(data, tensor, pipeline, pieces),
        schedule="interleaved" if pieces > 1 else "1f1b",
        overlap=True,
    )


def cluster() -> Cluster:
    """Of DGX A100 nodes, as many as needed, with half as many links above as below."""
    preset = load_cluster("dgx-a100")
    return replace(preset, tiers=(*preset.tiers[:-1], replace(preset.tiers[-1], devices=16_384, oversubscription=2.0)))


def render(rounds: int) -> str:
    started = os.getloadavg()[0]
    lines = [
        f"A step of {RANKS:,} ranks ({MODEL.name}, {MODEL.parameters / 1e9:.0f} billion parameters, {MICROBATCHES} "
        "microbatches a pipeline, gradients beside the last backward pass), played as events.",
        "",
        "| tensor x pipeline x data | pieces a stage | conditions | folded: s | rank by rank: s | the step: s |",
        "|---|---|---|---|---|---|",
    ]
    for tensor, pipeline, pieces in SPLITS:
        wanted = job(tensor, pipeline, pieces)
        for name, conditions in CONDITIONS.items():
            folded, step_s = timed(wanted, conditions, rounds, folded=True) if conditions.symmetric else (None, 0.0)
            whole, step_s = timed(wanted, conditions, rounds, folded=False)
            lines.append(
                f"| {tensor} x {pipeline} x {wanted.split.data} | {pieces} | {name} "
                f"| {'-' if folded is None else f'{folded:.3f}'} | {whole:.2f} | {step_s:.3f} |"
            )
    lines += ["", f"Least of {rounds} rounds, processor time of one thread; {spoken((started, os.getloadavg()[0]))}"]
    return "\n".join(lines) + "\n"


def timed(wanted: Job, conditions: Conditions, rounds: int, *, folded: bool) -> tuple[float, float]:
    """Seconds that it takes, and those of the step."""
    at, least, step_s = cluster(), float("inf"), 0.0
    for _ in range(rounds):
        began = time.process_time()
        step_s = simulate(MODEL, at, wanted, conditions, folded=folded).prediction.step_s
        least = min(least, time.process_time() - began)
    return least, step_s


def main(arguments: list[str]) -> None:
    table = render(int(arguments[0]) if arguments else 3)
    RESULT.write_text(table)
    print(table)


if __name__ == "__main__":
    main(sys.argv[1:])
