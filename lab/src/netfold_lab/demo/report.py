"""`report.html`: one file without network, with charts and pictures inside."""

from __future__ import annotations

import os
import shlex
import sys
from datetime import datetime, timezone
from pathlib import Path

import torch

from netfold.page.escape import escape, items, terms
from netfold.page.layout import render_layout
from netfold.page.table import text_table
from netfold_lab.demo import figures
from netfold_lab.demo.agreement import ALLOWED_RATIO
from netfold_lab.demo.experiment import Experiment, HeldOut
from netfold_lab.demo.settings import SCALE
from netfold_lab.demo.table import COLUMNS, notes, rows
from netfold_train.runs.machine import describe_machine, describe_versions
from netfold_train.zoo.data.super_resolution import HELD_OUT, TRAINING

# The style sheet shows crops this many times as large, so that single pixels are visible.
CROP_ZOOM = 3


def write(story: Experiment, folder: Path, seconds: float) -> Path:
    """Write the page into `folder`, which is created if it is missing. seconds: the duration of the demo."""
    folder.mkdir(parents=True, exist_ok=True)
    page = folder / "report.html"
    page.write_text(render(story, seconds), encoding="utf-8")
    return page


def render(story: Experiment, seconds: float) -> str:
    strips = "".join(map(_strip, story.held_out))
    photographs = f"""<p>Held-out photographs at half their size, enlarged {SCALE} times. Each detail is the
{figures.CROP_PIXELS} × {figures.CROP_PIXELS} pixels of the photograph in which <em>bicubic</em> errs most, shown
{CROP_ZOOM} times as large, pixel by pixel.</p>
{strips}"""
    table = text_table("results", "Both backends, and plain bicubic enlargement.", COLUMNS, rows(story))
    return render_layout(
        title="netfold demo",
        headline="The same network, trained through a switch and without one",
        opening=f"<p>{_what_happened(story)}</p>{items((f'{each}.' for each in story.failures()), 'failed')}",
        facts=_facts(story),
        sections=[
            ("table", "Results", table + items(notes(story.training), "notes")),
            ("losses", "The losses", figures.loss_curves(story)),
            ("equal", "Equal, but for rounding?", f"<p>{_how_equal(story)}</p>{figures.deviations(story.agreement)}"),
            ("photographs", "What the network sees", photographs),
            ("made", "How it was made", terms(_made(story, seconds).items())),
        ],
    )


def _what_happened(story: Experiment) -> str:
    training = story.training
    return (
        f"{training.workers} worker processes on this machine trained EDSR, a super-resolution network of "
        f"{story.parameters:,} parameters, for {training.steps} steps with PyTorch's DistributedDataParallel. "
        "First over netfold: a <em>switch</em>, one more process, added up their gradients. Then from the same "
        "seeds over gloo: the workers added up their gradients among themselves. The photographs are those that ship "
        f"with scikit-image: {len(TRAINING)} to train on, and {len(HELD_OUT)} held out to judge by."
    )


def _how_equal(story: Experiment) -> str:
    agreement = story.agreement
    permutations = len(agreement.gloo_differences)
    if not agreement.gloo_ever_differs:
        return (
            "Sums of floating-point numbers depend on their order, but two numbers have the same sum either way. Over "
            f"{agreement.steps} steps {escape(agreement.in_words())}."
        )
    return (
        "Sums of floating-point numbers depend on their order, and training amplifies the last bit from step to step. "
        f"So gloo ran {permutations} more times, {agreement.steps} steps each, with the same batches and permuted "
        "ranks: only the order of its sums changes. In each of these steps, the largest difference so far of netfold "
        "from gloo is divided by that of gloo from gloo. The geometric mean of these ratios is "
        f"<strong>{agreement.ratio:.2f}</strong>. Up to {ALLOWED_RATIO:.0f} counts as rounding: netfold's sums are one "
        "more sample of the same noise. Gradients rounded to bfloat16 give 249 and more. After these steps rounding "
        "has grown into different, equally good trainings, and only the results are compared."
    )


def _facts(story: Experiment) -> list[tuple[str, str]]:
    agreement = story.agreement
    gain = story.mean_psnr("netfold") - story.mean_psnr("bicubic")
    if agreement.gloo_ever_differs:
        equal = (
            f"{agreement.ratio:.2f} ×",
            "netfold's losses differ from gloo's by this many times the difference that gloo has from itself when its "
            f"ranks change places; up to {ALLOWED_RATIO:.0f} is rounding",
        )
    else:
        equal = (
            f"{float(agreement.difference.max()):.2g}",
            "largest difference of netfold's losses from gloo's, which do not depend on the order of its ranks",
        )
    wire = story.netfold.wire_bytes_per_step / story.gloo.wire_bytes_per_step
    return [
        (f"{gain:+.2f} dB", "EDSR over netfold against bicubic, on held-out photographs"),
        equal,
        (
            f"{wire:.2f} ×",
            "bytes on the wire a worker, netfold to gloo: the switch adds, so each gradient goes up once and comes "
            "down once",
        ),
    ]


def _strip(photograph: HeldOut) -> str:
    crop, name = figures.crop(photograph), escape(photograph.name)
    height, width = photograph.pair.truth.shape[-2:]
    frame = (
        f"top:{100 * crop.top / height:.2f}%;left:{100 * crop.left / width:.2f}%;"
        f"width:{100 * figures.CROP_PIXELS / width:.2f}%;height:{100 * figures.CROP_PIXELS / height:.2f}%"
    )
    details = (
        ("low resolution", crop.low, f"{figures.CROP_PIXELS // SCALE} × {figures.CROP_PIXELS // SCALE} pixels"),
        ("bicubic", crop.bicubic, f"{crop.bicubic_psnr:.2f} dB here"),
        ("EDSR over netfold", crop.netfold, f"{crop.netfold_psnr:.2f} dB here"),
        ("truth", crop.truth, ""),
    )
    pictures = "".join(
        f'<figure class="crop"><img src="{source}" alt="{name}, {label}">'
        f"<figcaption><strong>{label}</strong> {text}</figcaption></figure>"
        for label, source, text in details
    )
    decibels = photograph.psnr
    return f"""<h3>{name} <small>whole photograph: bicubic {decibels["bicubic"]:.2f}, netfold {decibels["netfold"]:.2f}
({decibels["netfold"] - decibels["bicubic"]:+.2f}), gloo {decibels["gloo"]:.2f} dB</small></h3>
<div class="pictures">
<figure class="whole"><div><img src="{figures.png(photograph.pair.low)}" alt="{name}"><i style="{frame}"></i></div>
</figure>{pictures}
</div>
"""


def _made(story: Experiment, seconds: float) -> dict[str, str]:
    training = story.training
    machine, versions = describe_machine(), describe_versions({"torch": torch.__version__})
    return {
        "command": shlex.join([os.path.basename(sys.argv[0]), *sys.argv[1:]]),
        "when": f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC; {seconds:.0f} s in total",
        "machine": f"{machine['cpu']}, {machine['cores']} cores, Linux {machine['kernel']}",
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "network": f"EDSR ×{SCALE}: {training.blocks} residual blocks of {training.features} features, "
        f"{story.parameters:,} parameters, {4 * story.parameters / 2**20:.2f} MB of gradients a step; "
        "adds to the bicubic enlargement",
        "training": f"{training.steps} steps of {training.patches} patches, L1 loss, Adam, peak learning rate "
        f"{training.learning_rate:g}, seed {training.seed}, 1 thread per worker",
        "trained on": ", ".join(TRAINING),
        "held out": ", ".join(HELD_OUT),
    }
