"""Data parallel between two sites over a slow link, plain and by DiLoCo, to an equal loss; as root:

    .venv/bin/python lab/bench/diloco.py

Each site is a host of an emulated rack. A small GPT learns Python's source. Plain data parallel takes STEPS steps, and
DiLoCo MORE times as many, each with its whole schedule of the learning rate. A run is as good as plain data parallel if
its loss on the held-out examples, from the same seed, is no higher. Seconds are those of training, without the
evaluation at the end, on the slowest rank. Configurations take turns, seed by seed, in the same processes.
"""

from __future__ import annotations

import os
import time
from importlib.metadata import version
from typing import Any

import driver
from driver import Place, Rank

from netfold_lab.bench.spread import spread

RECIPE: dict[str, Any] = {
    "model": {"name": "gpt", "context": 64},
    "data": {"name": "source", "context": 64, "held_out": 0.01},
    "optimizer": {"name": "adamw", "lr": 3e-3, "betas": [0.9, 0.98], "weight_decay": 0.01},
    "schedule": {"warmup": 20, "final": 0.1},
}
STEPS, MORE = 150, 1.5
ROUND: dict[str, Any] = {"every": 25, "lr": 1.0, "momentum": 0.0}
STREAMING: dict[str, Any] = {**ROUND, "fragments": 3, "overlap": 8}
# [diloco], and the number format of plain data parallel's gradients.
CONFIGURATIONS: dict[str, tuple[dict[str, Any] | None, str]] = {
    "plain, f32": (None, "f32"),
    "plain, i8": (None, "i8"),
    "DiLoCo": (ROUND, ""),
    "DiLoCo, i8": ({**ROUND, "wire": "i8"}, ""),
    "streaming": (STREAMING, ""),
    "streaming, i8": ({**STREAMING, "wire": "i8"}, ""),
}


def train(me: Rank) -> None:
    """A rank. An order is a run: seconds, bits per byte, bytes sent between sites, the baseline, the parameters."""
    from netfold_train import Recipe, Trainer
    from netfold_train.callbacks.events import Callback, Evaluated

    class Clock(Callback):
        seconds = 0.0

        def on_evaluation(self, event: Evaluated) -> None:
            self.seconds = time.perf_counter() - event.seconds

    def run(steps: int, seed: int, diloco: dict[str, Any] | None, wire: str) -> Any:
        os.environ["NETFOLD_WIRE_DTYPE"] = wire or "f32"
        recipe = {**RECIPE, "training": {"steps": steps, "batch": 32, "seed": seed}, "parallel": {"data": me.size}}
        if diloco is not None:
            recipe["diloco"] = {**diloco, "sites": 2}
        clock = Clock()
        with me.torch_group():
            trainer = Trainer(Recipe.model_validate(recipe), callbacks=[clock])
            me.line.cross()
            before, began = _sent_bytes(), time.perf_counter()
            outcome = trainer.fit()
            sent = _sent_bytes() - before
            parameters = sum(weight.numel() for _, weight in trainer.replica.named_parameters())
        return clock.seconds - began, outcome.metric, sent, trainer.data.metric.baseline, parameters

    me.serve(run)


def _steps(asked: dict[str, Any] | None) -> int:
    return STEPS if asked is None else round(MORE * STEPS)


def _sent_bytes() -> int:
    """Bytes that this host has sent, with all headers."""
    with open("/sys/class/net/eth0/statistics/tx_bytes") as counter:
        return int(counter.read())


def diloco(ranks: int = 2, seeds: int = 3, rate: str = "50mbit", delay: str = "10ms", switch: bool = False) -> str:
    """Data parallel between two sites over a slow link, plain and by DiLoCo"""
    place = Place(ranks, rate, hosts=2, delay=delay, switch=switch)
    found: dict[str, list[Any]] = {name: [] for name in CONFIGURATIONS}
    with driver.ranks_at(place, train, deadline_s=3600) as started:
        for seed in range(seeds):
            for name, (asked, wire) in CONFIGURATIONS.items():
                answers = started.ask(_steps(asked), seed, asked, wire)
                first = answers[0]
                found[name].append((max(answer[0] for answer in answers), *first[1:]))
    plain, compressed = found["plain, f32"], found["plain, i8"]
    rows = []
    for name, runs in found.items():
        seconds, bits, sent = ([run[number] for run in runs] for number in range(3))
        as_good = sum(ours <= theirs[1] for ours, theirs in zip(bits, plain, strict=True))
        faster, than_i8 = (
            [theirs[0] / ours for ours, theirs in zip(seconds, each, strict=True)] for each in (plain, compressed)
        )
        rows.append(
            [
                name,
                _steps(CONFIGURATIONS[name][0]),
                f"{spread(seconds).median:.1f} ({min(seconds):.1f} .. {max(seconds):.1f})",
                f"{spread(faster).median:.2f} ({min(faster):.2f} .. {max(faster):.2f})",
                f"{spread(than_i8).median:.2f} ({min(than_i8):.2f} .. {max(than_i8):.2f})",
                f"{spread(bits).median:.3f} ({min(bits):.3f} .. {max(bits):.3f})",
                f"{as_good} of {seeds}",
                f"{spread(sent).median / 1e6:.1f}",
            ]
        )
    baseline, parameters = plain[0][3:]
    head = "configuration | steps | seconds | seconds of plain, f32, over it | of plain, i8 | bits per byte, held out"
    schedule = f"rounds of {ROUND['every']} steps, outer rate {ROUND['lr']:g}, momentum {ROUND['momentum']:g}"
    fragments = f"{STREAMING['fragments']} fragments, each sent during {STREAMING['overlap']} steps"
    return f"""A GPT of {parameters} parameters learns Python's source on {ranks} data-parallel ranks at
two sites. Between the sites: {rate}, a round trip of four times {delay}, {"through a" if switch else "no"} switch.

{driver.table(head + " | as good as plain, f32 | MB that site 0 sent", rows)}

Median (lowest .. highest) of {seeds} seeds. Plain data parallel: DDP; i8: netfold sends its gradients as i8.
DiLoCo: {schedule}. Streaming: {fragments}. A table of byte pairs
alone gives {baseline:.3f} bits. torch {version("torch")}."""


if __name__ == "__main__":
    driver.run(diloco)
